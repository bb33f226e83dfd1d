"""What a job would say of a launch line, read from a launch script."""

from __future__ import annotations

import json

import pytest

from odyssey_megatron.cli import main
from odyssey_megatron.doctor import command
from odyssey_megatron.doctor.launch_line import judged, read_job
from odyssey_megatron.doctor.launch_script import launch_line
from odyssey_megatron.errors import ConfigError

ARRAYS = """
GPUS=8   # --fp16 in a comment is none
STAGES=${STAGES:-4}
DISTRIBUTED=(--nproc_per_node $GPUS --nnodes 1)
MODEL=(
    --num-layers 24  # as it was
    "--hidden-size 1024"
    --untie-embeddings-and-output-weights
)
if [ -n "$BF16" ]; then
    MODEL+=(--bf16)
fi
export NAME="a b" OUT=$(mktemp -d "/tmp/$USER (x)")
torchrun "${DISTRIBUTED[@]}" $ROOT/pretrain_gpt.py \\
    ${MODEL[@]} --pipeline-model-parallel-size $STAGES \\
    --wandb-exp-name "$NAME" --save "$OUT" --split '99,1' && echo --done
"""
STRING = """
options=" \\
    --num-layers 24 \\
    --untie-embeddings-and-output-weights"
run_cmd="cd $DIR && python -u pretrain_gpt.py ${options} --bf16"
srun -l --output=log sh -c "${run_cmd}" --not-of-the-job
"""


def test_a_script_with_arrays():
    flags = "--num-layers 24 --hidden-size 1024 --untie-embeddings-and-output-weights --bf16"
    more = ["--wandb-exp-name", "a b", "--save", "$(...)", "--split", "99,1"]
    assert launch_line(ARRAYS).flags == [*flags.split(), "--pipeline-model-parallel-size", "4", *more]


def test_an_array_that_is_put_before_more():
    text = 'A=(--x 1)\nB=$A\nif [ -n "$FSDP" ]; then\nA=(\n"${A[@]}"\n--y 2\n)\nfi\nA+=(--z)\npython a.py ${A[@]}'
    assert launch_line(text)[:2] == ("a.py", ["--x", "1", "--y", "2", "--z"])


def test_a_script_with_a_command_in_a_string():
    assert launch_line(STRING).flags == "--num-layers 24 --untie-embeddings-and-output-weights --bf16".split()


@pytest.mark.parametrize(
    ("script", "flags"),
    [
        # A comment ends with its line, though that ends in a backslash.
        ("#   --fp16 \\\npython a.py --x 1", "--x 1"),
        ("python a.py --x 1 \\\n  --y 2", "--x 1 --y 2"),
        # What begins first hides the rest: a comment in quotes is none, nor is a quote in a comment or here-document.
        ("echo 'all # ranks'\necho \"of # them\"\npython a.py --x 1 # don't --y 2", "--x 1"),
        ("cat <<EOF > f # isn't\nit's # one\nEOF\npython a.py --x 'b'", "--x b"),
        # A command in a variable, with a line's end in it that the shell does not see.
        ('CMD="torchrun a.py\n $OF --x 1"\necho $CMD\neval $CMD', "$OF --x 1"),
        ("N=6\npython a.py --x $((4 * $N / (1 + 2))) --y $((N % 4))", "--x 8 --y 2"),
        ("python a.py --x $(( $(nproc) * N ))", "--x $(($(...)*N))"),
        ("A=2\nB=$((A > 1 && A != 3))\npython a.py --x $B", "--x 1"),
        (
            "#SBATCH -N 4\n#SBATCH --gpus-per-node=h100:8\npython a.py --x $((SLURM_NNODES*SLURM_GPUS_PER_NODE))",
            "--x 32",
        ),
        # Branches whose condition is known.
        (
            'S=7b\nif [ $S = 1b ]; then N=1; elif [[ "$S" == 7b ]]; then N=7\nelse N=9; fi\npython a.py --x $N',
            "--x 7",
        ),
        (
            "N=2\nif [ $N -gt 1 ] && [[ $N -lt 4 && -n $N ]]; then O=--y; fi\npython a.py --x $N $O",
            "--x 2 --y",
        ),
        ("V=2\nif (( V > 3 )); then V=3; fi\npython a.py --x $V", "--x 2"),
        (
            "T=M\nif [[ $T == M ]] || [[ $Q == M ]]; then O=(--y $PWD/a); else O=(--z); fi\npython a.py --x 1 ${O[@]}",
            "--x 1 --y $PWD/a",
        ),
        ("T=M\nif [[ $T = L || -z $T ]]; then O=--y; fi\npython a.py --x 1 $O", "--x 1"),
        ("T=M\nO=--z\nif ! [[ -z $T || $T = L ]]; then O=--y; fi\npython a.py --x 1 $O", "--x 1 --y"),
        (
            "T=M\nO=--z\nif [[ $T = M || $Q = L && $T = L ]]; then O=--y; fi\npython a.py --x 1 $O",
            "--x 1 --y",
        ),
        ("if false; then\npython a.py --x 1 --y 1\nfi\npython b.py --z 1", "--z 1"),
        ("S=7b\ncase $S in\n1b) N=1 ;;\n7b|8b)\nN=7\n;;\n*) N=9 ;;\nesac\npython a.py --x $N", "--x 7"),
        ('T=4\n[ -z "$T" ] && T=1\n[ $T = 4 ] || T=5\npython a.py --x $T', "--x 4"),
        ("N=1\nif [ $N -gt 1 ]; then O=--y; P=(--z); fi\npython a.py --x $N $O ${P[@]}", "--x 1"),
        # Of others all are read, but what is not known takes nothing's place.
        (
            "N=4\nwhile [ $# -gt 0 ]; do case $1 in --n) N=$2; shift 2 ;; esac; done\npython a.py --x $N",
            "--x 4",
        ),
        (
            'if [ $A = full ]; then O="--y"; elif [ $A = none ]; then O=" "; fi\npython a.py --x 1 $O',
            "--x 1 --y",
        ),
        # A list of flags is not nothing, though the value of one of them is not known.
        (
            "O=()\nif [ -f a ]; then O+=(--y 2 --w $PWD/a); fi\npython a.py --x 1 ${O[@]}",
            "--x 1 --y 2 --w $PWD/a",
        ),
        (
            "O=(--y 2)\nif [ -f a ]; then O+=(--w $PWD); fi\npython a.py --x 1 ${O[@]}",
            "--x 1 --y 2 --w $PWD",
        ),
        (": ${N:=4}\npython a.py --x $N", "--x 4"),
        ("python a.py --x ${N:-${M:-3}}", "--x 3"),
        # A here-document is text; it may be a script.
        ("cat <<EOF > a.json\nit's {\nEOF\npython a.py --x 1", "--x 1"),
        ("N=3\ncat > job.sh <<'EOF'\npython a.py --x $N\nEOF\nbash job.sh", "--x 3"),
        ("python a.py ${ALL[@]}", "${ALL[@]}"),
        ("A=\"--x '([1]*4)'\"\npython a.py $A", "--x ([1]*4)"),
    ],
)
def test_what_a_script_does_before_its_launch_line(script, flags):
    assert launch_line(script).flags == flags.split()


def test_a_script_takes_variables_and_arguments(tmp_path):
    """As they are typed to start it."""
    path = tmp_path / "train.sh"
    path.write_text(
        'S=$1; shift\nif [ $S = 7b ]; then N=32; else N=80; fi\npython a.py --x $N --y ${T:-1} "$@"'
    )
    assert read_job(f"T=2 {path} 7b --z").flags == ["--x", "32", "--y", "2", "--z"]
    assert read_job(str(path)).choices == {"N": ["80", "32"]}
    long = "x" * 300
    assert read_job(f"{path} {long}").flags == ["--x", "80", "--y", "1"], "no file has a name this long"
    with pytest.raises(ConfigError, match=f"--job {long}"):
        read_job(long)


def test_files_that_a_script_sources_are_read(tmp_path):
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "7b.sh").write_text("MODEL=(--x 7)")
    path = tmp_path / "train.sh"
    path.write_text('source "$(dirname $0)/more/$1.sh"\n. nowhere.sh\npython a.py ${MODEL[@]} --y 1')
    assert read_job(f"{path} 7b").flags == ["--x", "7", "--y", "1"]
    assert read_job(f"{path} 8b").flags == ["${MODEL[@]}", "--y", "1"]
    (tmp_path / "more" / "7b.sh").write_text(f"source {path} 7b")
    with pytest.raises(ConfigError, match="more than 100 files"):
        read_job(f"{path} 7b")


def test_it_is_said_which_values_other_branches_have(tmp_path, capsys):
    path = tmp_path / "train.sh"
    path.write_text(
        "if [ $S = 1b ]; then N=8\nelif [ $S = 7b ]; then N=32\nfi\nA=1\nif [ $S = 7b ]; then B=2; fi\n"
        'OF="--num-layers $N"\ntorchrun pretrain_gpt.py $OF --hidden-size $((A*64)) --bf16\n'
    )
    assert main(["doctor", "--job", str(path)]) == 0
    told = capsys.readouterr().out
    assert "$N is 32 as it is read here, and 8 in other branches" in told
    assert "$B" not in told
    assert "--job 'NAME=VALUE train.sh ARGUMENT ...'" in told
    assert main(["doctor", "--job", f"S=1b {path}"]) == 0
    assert "branches" not in capsys.readouterr().out


def test_only_values_that_differ_are_named():
    text = "if [ $S = 1 ]; then N=1; L=a$Q\nelif [ $S = 2 ]; then N=2; L=b$Q\nelse N=1; fi\npython a.py --x $N --y $L"
    assert launch_line(text).choices == {"N": ["1", "2"]}


def test_a_quote_that_is_not_closed_is_found():
    with pytest.raises(ConfigError, match=r"the quote ' in line 3 is not closed"):
        launch_line("A=\"it's\" # it's\npython a.py \\\n--x '1\n--y 2")


@pytest.mark.parametrize(
    ("layout", "starts"),
    [("Et*3|(tt|)*29m|L", False), ("Et*3|(tt|)*29mL", True), ("Ett|ttL", True), ("$LAYOUT_m", True)],
)
def test_multi_token_prediction_apart_from_the_loss_is_refused(layout, starts):
    """As DeepSeek-V3 has it; a job would say so only once all its ranks have started."""
    assert judged(["--mtp-num-layers", "1", "--pipeline-model-parallel-layout", layout]).starts is starts


def test_the_scripts_of_this_repository_start(checkout):
    flags = read_job(str(checkout / "examples" / "megatron_lm" / "tiny.sh")).flags
    assert {"--num-layers", "--odyssey", "--mock-data"} < set(flags)
    assert judged(flags).starts


def test_the_scripts_of_megatron_lm(megatron_lm):
    found = {
        name: judged(read_job(str(megatron_lm / "examples" / f"{name}.sh")).flags, "0.16.1")
        for name in ("gpt3/train_gpt3_175b_distributed", "llama/train_llama3_8b_h100_fp8")
    }
    gpt3, llama = found.values()
    assert gpt3.starts
    assert set(llama.refused) == {"--fp8-recipe"}  # delayed scaling, which is the default
    assert "--overlap-grad-reduce" in llama.ignored
    assert not gpt3.unknown
    assert not llama.unknown


def test_a_script_that_trains_something_else_is_refused(tmp_path, capsys):
    """Whatever its flags say; of one that nobody knows it is said that its model has not been looked at."""
    told = {}
    for script in ("pretrain_t5.py", "mine.py", "pretrain_gpt.py"):
        path = tmp_path / f"{script}.sh"
        path.write_text(f"torchrun $ROOT/{script} --num-layers 4 --bf16 --odyssey")
        told[script] = main(["doctor", "--job", str(path)]), capsys.readouterr().out
    assert [code for code, _ in told.values()] == [1, 0, 0]
    assert (
        "pretrain_t5.py does not work with --odyssey: it trains an encoder and a decoder"
        in told["pretrain_t5.py"][1]
    )
    assert "mine.py is none of pretrain_gpt.py, " in told["mine.py"][1]
    assert told["pretrain_gpt.py"][1].endswith("starts with --odyssey as far as its flags say\n")


@pytest.mark.parametrize("joined", [False, True])
def test_a_job_may_be_given_in_one_word(tmp_path, capsys, joined):
    """Else the doctor would look at this machine instead, as if ``--job=FILE`` were a flag of the job's script."""
    path = tmp_path / "train.sh"
    path.write_text("torchrun pretrain_gpt.py --num-layers 4 --use-megatron-fsdp")
    assert main(["doctor", *([f"--job={path}"] if joined else ["--job", str(path)]), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["starts"] is False


def test_it_is_said_where_flags_may_be_that_nobody_has_read(tmp_path, capsys):
    path = tmp_path / "job.sh"
    path.write_text(
        ". common.sh\nLR=1e-4\ntorchrun pretrain_gpt.py $MODEL --bf16 ${MORE[@]} --lr $LR --save $OUT "
        '--exit-interval=$N $(cat args) --num-layers 4 "$@"\n'
    )
    assert main(["doctor", "--job", str(path)]) == 0
    assert "what they stand for: $MODEL ${MORE[@]} $(...) $@." in capsys.readouterr().out
    assert judged(["--num-layers", "4", "--data-path", "$DATA", "--bf16"]).unread == ()


@pytest.mark.parametrize(
    "line",
    [
        "--num-layers 4 --pipeline-model-parallel-size $1",
        "--num-layers $1 --pipeline-model-parallel-size 8",
        "--num-experts 4 --expert-tensor-parallel-size 2 --expert-model-parallel-size $1",
        "--optimizer muon --muon-tp-mode duplicated --tensor-model-parallel-size $1",
        "--optimizer $1",
        "--bf16 --recompute-modules $1 --exp-avg-dtype ${TYPE}",
        "--sft --no-create-attention-mask-in-dataloader --micro-batch-size $1",
        "--tensor-parallel-num-weight-shards 2 --tensor-model-parallel-size $1",
        "--expert-tensor-parallel-num-weight-shards $1",
    ],
)
def test_a_size_that_only_running_the_script_would_tell_refuses_nothing(line):
    assert judged(line.split()).starts


def test_it_is_said_which_values_decide_that_only_running_it_would_tell(tmp_path, capsys):
    """Of Megatron-LM's flags and of Odyssey's; what is given behind the script counts."""
    path = tmp_path / "job.sh"
    path.write_text(
        "torchrun pretrain_gpt.py --num-layers 4 --optimizer $O --odyssey-respawn $R --odyssey-run-dir $D "
        '--odyssey-policy=$P --odyssey "$@"\n'
    )
    assert main(["doctor", "--job", str(path)]) == 0
    told = capsys.readouterr().out
    assert "only running it would tell: --optimizer $O, --odyssey-respawn $R, --odyssey-policy=$P." in told
    assert "what they stand for: $@." in told
    assert main(["doctor", "--job", str(path), "--optimizer", "lion", "--odyssey-respawn", "2"]) == 1
    told = capsys.readouterr().out
    assert "--optimizer lion does not work" in told
    assert "only running it would tell: --odyssey-policy=$P." in told
    assert main(["doctor", "--job", str(path), "--odyssey-respawn", "two"]) == 2


@pytest.fixture
def doctored(tmp_path, capsys):
    """The exit code and what is said of a script's text."""

    def doctor(text: str) -> tuple[int, str]:
        path = tmp_path / "train.sh"
        path.write_text(text)
        return main(["doctor", "--job", str(path)]), "".join(capsys.readouterr())

    return doctor


@pytest.mark.parametrize("launcher", ["odyssey run --nproc-per-node 8", "torchrun --nnodes 2"])
def test_a_flag_of_odyssey_before_the_script_is_refused(doctored, launcher):
    """As the launcher does."""
    code, told = doctored(f"{launcher} --odyssey pretrain_gpt.py --num-layers 4\n")
    assert code == 1
    assert "--odyssey stands before pretrain_gpt.py: what is before the script is for the launcher" in told
    assert "no --odyssey yet" not in told


def test_variables_that_a_script_sets_count(doctored):
    line = "odyssey run pretrain_gpt.py --num-layers 4\n"
    code, told = doctored(f"export ODYSSEY=recover ODYSSEY_REDUNDANCY=foo\n{line}")
    assert code == 2
    assert "--odyssey-redundancy 'foo' is unknown" in told
    assert doctored(f"export ODYSSEY_RESPAWN=two\nODYSSEY=recover {line}")[0] == 2
    code, told = doctored(f"export ODYSSEY=recover ODYSSEY_RESPAWN=$R\n{line}")
    assert code == 0
    assert "only running it would tell: ODYSSEY_RESPAWN=$R." in told
    assert "no --odyssey yet" not in told


@pytest.mark.parametrize("more", ["", " --odyssey off", " --odyssey-respawn 2"])
def test_a_script_without_odyssey_is_told_so(doctored, more):
    code, told = doctored(f"odyssey run pretrain_gpt.py --num-layers 4{more}\n")
    assert code == 0
    assert "its launch line has no --odyssey yet: append it, or the job survives no loss" in told


def test_flags_of_odyssey_that_change_nothing_are_told():
    line = ["--num-layers", "4", "--odyssey", "--odyssey-redundancy-level", "2"]
    assert set(judged(line).ignored) == {"--odyssey-redundancy-level"}
    assert not judged([*line, "--use-distributed-optimizer"]).ignored


@pytest.mark.parametrize(
    ("flags", "refused"),
    [
        ("--recompute-modules core_attn mlp", True),
        ("--recompute-modules mlp", True),
        ("--recompute-modules=mlp", True),
        ("--recompute-modules core_attn moe", False),
        ("--recompute-modules core_attn mlp --disable-bias-linear", False),
        ("--recompute-modules core_attn $MORE", False),
        ("--pipeline-model-parallel-size 5 $MORE", True),
    ],
)
def test_all_words_behind_a_flag_count(flags, refused):
    line = ["--num-layers", "4", "--recompute-granularity", "selective", *flags.split()]
    assert bool(judged(line).refused) == refused


def test_misspelled_flags_are_asked_about():
    """Megatron's parser ends the job at them."""
    told = judged(["--num-layer", "4", "--of-nobody", "3"]).told("a job")
    assert "so of the script's own: --num-layer (is --num-layers meant?) --of-nobody" in told


BAD = {
    "nothing": "",
    "no-script": "echo --num-layers 3",
    "a-quote": "torchrun pretrain_gpt.py --num-layers '3",
    "no-json": '{"cases": [',
    "no-cases": '{"cases": 3}',
    "several": '{"cases": [{"name": "a"}, {"name": "b"}]}',
    "a-list": '{"args": {"--num-layers": [3]}}',
    "doubling": "A=(--x --x)\n" + 'A+=("${A[@]}")\n' * 40 + "python x.py ${A[@]}",
    "of-ours": "python x.py --odyssey-nonsense",
}


@pytest.mark.parametrize("bad", BAD)
def test_what_cannot_be_read_is_one_paragraph(tmp_path, bad, capsys):
    path = tmp_path / "job"
    path.write_text(BAD[bad])
    assert main(["doctor", "--job", str(path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_script_has_no_cases(tmp_path):
    path = tmp_path / "train.sh"
    path.write_text("python pretrain_gpt.py --num-layers 4")
    assert read_job(str(path)).flags == ["--num-layers", "4"]
    with pytest.raises(
        ConfigError, match=r"train.sh is a script, which has no cases. What it takes: --job 'NAME=VALUE"
    ):
        read_job(f"{path}:7b")


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        read_job(str(tmp_path / "nowhere.sh"))
    assert main(["doctor", "--job"]) == 2


def test_a_flag_of_another_version_is_not_asked_about():
    told = judged(["--hybrid-layer-pattern", "M*"], "0.16.1").told("a job")
    assert "not megatron-core 0.16.1's: --hybrid-layer-pattern (known from core_v0.17.1 on). Name the" in told
    assert "of the script's own" not in told


NEW = "--mtp-num-layers 1 --mtp-detach-heads"


@pytest.mark.parametrize("place", ["path", "working directory", "job's folder", "checkout named"])
@pytest.mark.parametrize(
    ("minor", "number", "said"),
    [
        (19, 1, "--mtp-detach-heads does not work with"),
        (16, 1, "megatron-core 0.16.1 does not have it (known from"),
    ],
)
def test_a_line_is_judged_by_the_checkout_that_has_its_script(
    tmp_path, monkeypatch, capsys, place, minor, number, said
):
    """Not by the megatron-core that is installed, which the job does not import."""
    checkout, elsewhere = tmp_path / "checkout", tmp_path / "elsewhere"
    (checkout / "megatron" / "core").mkdir(parents=True)
    elsewhere.mkdir()
    (checkout / "pretrain_gpt.py").touch()
    info = f"MAJOR = 0\nMINOR = {minor}\nPATCH = {number}\n"
    (checkout / "megatron" / "core" / "package_info.py").write_text(info)
    job = (checkout if place == "job's folder" else elsewhere) / "train.sh"
    script = f"{checkout}/pretrain_gpt.py" if place == "path" else "pretrain_gpt.py"
    job.write_text(f"odyssey run --nproc-per-node 8 {script} --num-layers 8 {NEW} --odyssey\n")
    monkeypatch.chdir(checkout if place == "working directory" else elsewhere)
    named = [str(checkout)] if place == "checkout named" else []
    assert main(["doctor", *named, "--job", str(job)]) == 1
    told = capsys.readouterr().out
    assert f"train.sh, by megatron-core 0.{minor}.{number}: refused" in told
    assert said in told


@pytest.mark.parametrize("text", ['add_argument("--mtp-detach-heads")', "mtp_detach_heads: bool = False"])
def test_a_fork_may_have_a_flag_of_another_version(tmp_path, capsys, text):
    (tmp_path / "megatron" / "core").mkdir(parents=True)
    (tmp_path / "megatron" / "core" / "package_info.py").write_text("MAJOR = 0\nMINOR = 16\nPATCH = 1\n")
    (tmp_path / "megatron" / "core" / "config.py").write_text(text)
    job = tmp_path / "train.sh"
    job.write_text(f"odyssey run pretrain_gpt.py --num-layers 8 {NEW} --odyssey\n")
    assert main(["doctor", str(tmp_path), "--job", str(job)]) == 0
    assert "not megatron-core 0.16.1's: --mtp-detach-heads (known from" in capsys.readouterr().out


def test_it_is_said_that_the_installed_version_decided(tmp_path, monkeypatch, capsys):
    info = tmp_path / "megatron" / "core" / "package_info.py"
    info.parent.mkdir(parents=True)
    info.write_text("MAJOR = 0\nMINOR = 16\nPATCH = 1\n")
    monkeypatch.setattr(command, "_installed", lambda: [tmp_path])
    job = tmp_path / "train.sh"
    job.write_text(f"odyssey run $ROOT/pretrain_gpt.py --num-layers 8 {NEW} --odyssey\n")
    assert main(["doctor", "--job", str(job)]) == 0
    told = capsys.readouterr().out
    assert "train.sh, by the installed megatron-core 0.16.1: starts" in told
    assert (
        "0.16.1's: --mtp-detach-heads (known from core_v0.19.0 on). Name the checkout that the job runs"
        in told
    )


@pytest.mark.parametrize("flag", ["--hybrid-layer-pattern", "--hybrid-override-pattern"])
def test_of_a_hybrid_pattern_the_layers_or_the_spec_are_refused(flag):
    stack = ["--spec", "megatron.core.models.mamba.mamba_layer_specs", "mamba_stack_spec"]
    assert "Hybrid models are given with --spec" in judged([flag, "M*-E|M"]).refused[flag]
    assert "Of hybrid patterns only the layers" in judged([flag, "MG"]).refused[flag]
    assert "Of hybrid patterns only the layers" in judged([flag, "MG", *stack]).refused[flag]
    assert judged([flag, "M*-E|M", *stack]).starts
    assert judged([flag, "$PATTERN"]).undecided == (f"{flag} $PATTERN",)
