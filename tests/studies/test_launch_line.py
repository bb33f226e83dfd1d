import pytest

from odyssey_megatron.doctor.launch_script import launch_line
from odyssey_megatron.doctor.launcher import nodes_and_gpus
from odyssey_megatron.errors import ConfigError
from odyssey_megatron.studies.launch_line import read, read_script

SIZES = "--num-layers 6 --hidden-size 256 --num-attention-heads 8 --vocab-size 1000 --seq-length 128".split()


def line(text="", sizes=SIZES):
    return read([*sizes, *text.split()])


def test_defaults_are_megatrons():
    found = line()
    assert (found.pipeline_model_parallel_size, found.micro_batch_size, found.global_batch_size) == (
        1,
        1,
        None,
    )
    model = found.model
    assert (model.ffn_hidden_size, model.is_gated, model.is_tied, model.precision.dtype_bytes) == (
        1024,
        False,
        True,
        4,
    )
    assert model.vocab_size == 1024, "in whole 128s"
    assert line("--swiglu").model.ffn_hidden_size == 640
    assert line("--tensor-model-parallel-size 4").model.vocab_size == 1024
    assert line("--tensor-model-parallel-size 8 --vocab-size 1025").model.vocab_size == 2048
    assert line("--group-query-attention").model.attention.weights == 2 * 256 * (256 + 32)


@pytest.mark.parametrize(
    ("flags", "share"),
    [
        ("--recompute-granularity selective", 0.0),
        ("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1", 1.0),
        ("--recompute-granularity full --recompute-method block --recompute-num-layers 2", 1 / 3),
        (
            "--recompute-granularity full --recompute-method block --recompute-num-layers 2 "
            "--pipeline-model-parallel-size 2",
            2 / 3,
        ),
    ],
)
def test_recomputation(flags, share):
    model = line(flags).model
    assert model.recomputed.share == pytest.approx(share)


@pytest.mark.parametrize(
    ("flags", "modules"),
    [
        ("--recompute-modules mlp", ""),
        ("--recompute-granularity selective", "core_attn"),
        ("--recompute-granularity selective --recompute-modules moe_act layernorm", "moe_act layernorm"),
        ("--moe-layer-recompute", "core_attn moe"),
    ],
)
def test_modules_that_are_recomputed(flags, modules):
    assert line(flags).model.recomputed.modules == {*modules.split()}


def test_modules_of_a_case_are_one_word():
    flags = ["--recompute-granularity", "selective", "--recompute-modules", "[mla_up_proj moe_act]"]
    assert read([*SIZES, *flags]).model.recomputed.modules == {"mla_up_proj", "moe_act"}


@pytest.mark.parametrize(
    ("text", "layers"),
    [("1", [1, 2, 3, 4, 5, 6]), ("2", [1, 3, 5]), ("([0]*2+[1]*4)", [3, 4, 5, 6]), ("[0,1]*3", [2, 4, 6])],
)
def test_layers_with_experts(text, layers):
    experts = read([*SIZES, "--num-experts", "4", "--moe-layer-freq", text]).model.experts
    assert sorted(experts.layers) == layers


@pytest.mark.parametrize(
    ("flags", "counts"),
    [
        ("", ()),
        ("--decoder-first-pipeline-num-layers 1 --pipeline-model-parallel-size 2", (1, 5)),
        ("--decoder-last-pipeline-num-layers 2 --pipeline-model-parallel-size 3", (2, 2, 2)),
        (
            "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split "
            "--pipeline-model-parallel-size 4",
            (1, 2, 2, 1),
        ),
        ("--pipeline-model-parallel-layout Et*3|tt|tmL --pipeline-model-parallel-size 3", (3, 2, 1)),
        (r"--pipeline-model-parallel-layout E\|\(tt,\|\)*3L --pipeline-model-parallel-size 5", ()),
        ("--pipeline-model-parallel-layout $LAYOUT --pipeline-model-parallel-size 2", ()),
    ],
)
def test_uneven_stages(flags, counts):
    assert line(flags).stage_layers == counts


def test_chunks_of_a_stage_are_counted_together():
    found = line("--pipeline-model-parallel-layout Et|tt|t|tt|(|)*1L --pipeline-model-parallel-size 3")
    assert (found.stage_layers, found.virtual_stages) == ((3, 2, 1), 2)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--num-layers", "$LAYERS"], r"--num-layers \$LAYERS: .* Give|--num-layers \$LAYERS"),
        (["--hidden-size", "0"], "--hidden-size 0"),
        (["--num-layers", "2000"], "at most 1,000"),
        (["--num-experts", "4", "--moe-layer-freq", "[1]*5"], "has 5 layers, and --num-layers is 6"),
        (["--num-experts", "4", "--moe-layer-freq", "__import__('os')"], "a number, or a list"),
        (["--num-experts", "4", "--moe-layer-freq", "[1]*10**9"], "a number, or a list"),
        (["--num-experts", "4", "--moe-layer-freq", "0"], "a number, or a list"),
        (["--num-experts", "4", "--moe-layer-freq", "(" * 5000], "a number, or a list"),
        (
            ["--pipeline-model-parallel-size", "3", "--decoder-first-pipeline-num-layers", "1"],
            "the others cannot have equally many",
        ),
        (
            ["--pipeline-model-parallel-size", "3", "--pipeline-model-parallel-layout", "Et|tt|ttt|L"],
            "has 6 layers in 4 chunks, and there are 6 layers and 3 stages",
        ),
    ],
)
def test_what_cannot_be_read_is_said(flags, message):
    with pytest.raises(ConfigError, match=message):
        read([*SIZES, *flags])


@pytest.mark.parametrize(
    ("flags", "notes"), [("--bf16", 0), ("--bf16 --fp8-format hybrid --fp8-recipe blockwise", 1), ("", 1)]
)
def test_a_precision_whose_speed_is_not_counted_is_said(flags, notes):
    found = line(flags)
    assert len([one for one in (*found.uncounted, *found.of_estimate) if "in bf16" in one]) == notes


@pytest.mark.parametrize(("method", "notes"), [("uniform", 0), ("block", 1)])
def test_layers_of_chunks_that_are_counted_in_stages_are_said(method, notes):
    found = line(f"--recompute-granularity full --recompute-num-layers 1 --recompute-method {method}").notes
    assert (
        len([one for one in found if "layers of each model chunk, and here those of stages" in one]) == notes
    )


def test_what_is_missing_is_named():
    for missing in ("--num-layers", "--hidden-size", "--num-attention-heads", "--seq-length", "--vocab-size"):
        at = SIZES.index(missing)
        with pytest.raises(ConfigError, match=f"has no {missing}"):
            read([*SIZES[:at], *SIZES[at + 2 :]])


@pytest.mark.parametrize(
    ("script", "size"),
    [
        ("GPUS=4\ntorchrun --nnodes=2 --nproc_per_node $GPUS pretrain_gpt.py --bf16", (2, 4)),
        ("A=(--nproc-per-node 8)\nodyssey run ${A[@]} pretrain_gpt.py --bf16", (1, 8)),
        ("torchrun --nproc-per-node 8 --nnodes $SLURM_NNODES pretrain_gpt.py --bf16", None),
        (
            "#SBATCH --nodes=16 # of them\n#SBATCH --gres=gpu:h100:8\n"
            "srun torchrun --nnodes $SLURM_NNODES --nproc-per-node gpu pretrain_gpt.py --bf16",
            (16, 8),
        ),
        (
            '#SBATCH --ntasks-per-node=8\nsrun -N4 sh -c "numactl -N 0 python pretrain_gpt.py --bf16"',
            (4, 8),
        ),
        ("#SBATCH --nodes=2-4\n#SBATCH --gpus-per-node=8\nsrun python pretrain_gpt.py --bf16", None),
        ("mpirun -np 32 --npernode 8 -bind-to none python pretrain_gpt.py --bf16", (4, 8)),
        ("N=4\nmpirun -np $((N*8)) --npernode 8 python pretrain_gpt.py --bf16", (4, 8)),
        ("deepspeed --num_nodes 2 --num_gpus 4 pretrain_gpt.py --bf16", (2, 4)),
        ("python pretrain_gpt.py --bf16", None),
    ],
)
def test_a_script_says_its_gpus(script, size):
    assert nodes_and_gpus(launch_line(script).launcher) == size


def test_variables_that_a_script_sets_count(tmp_path):
    path = tmp_path / "train.sh"
    path.write_text("export ODYSSEY_LAYOUT=spread\nodyssey run pretrain_gpt.py --bf16\n")
    assert read_script(str(path), SIZES, "").config.layout == "spread"
    path.write_text(path.read_text().replace("spread", "foo"))
    with pytest.raises(ConfigError, match="--odyssey-layout 'foo' is unknown"):
        read_script(str(path), SIZES, "")


def test_it_is_said_where_a_size_may_be(tmp_path):
    path = tmp_path / "train.sh"
    path.write_text("torchrun pretrain_gpt.py $MODEL --bf16")
    with pytest.raises(ConfigError, match=r"has no --num-layers; it may be in \$MODEL"):
        read_script(str(path), [], "")
    path.write_text(
        f"if [ $S = 1b ]; then L=2; else L=6; fi\ntorchrun pretrain_gpt.py {' '.join(SIZES)} --num-layers $L $O"
    )
    notes = read_script(str(path), [], "").notes
    assert any("flags in $O do not count" in one for one in notes)
    assert any("$L is 6 as it is read here, and 2 in other branches" in one for one in notes)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--vocab-file vocab.json --merge-file merges.txt", 50_257),
        ("--tokenizer-type GPT2BPETokenizer --vocab-file vocab.json --merge-file merges.txt", 50_257),
        ("--tokenizer-type HuggingFaceTokenizer --tokenizer-model x", 128_256),
        ("--vocab-file vocab.txt", 128_256),
    ],
)
def test_words_of_a_tokenizer_are_presumed(flags, words):
    at = SIZES.index("--vocab-size")
    sizes = [*SIZES[:at], *SIZES[at + 2 :], "--make-vocab-size-divisible-by", "1"]
    found = line(flags, sizes)
    assert found.model.vocab_size == words
    assert len([one for one in found.notes if f"{words:,} are presumed: --vocab-size says it" in one]) == 1
    given = line(f"{flags} --vocab-size 1000", sizes)
    assert given.model.vocab_size == 1000
    assert not [one for one in given.notes if "presumed" in one]


def test_a_hybrid_pattern_says_the_layers_whether_or_not_there_is_a_spec():
    stack = "--spec megatron.core.models.mamba.mamba_layer_specs mamba_stack_spec"
    rest = "--num-experts 4 --hybrid-layer-pattern M*-EM*"
    found, with_spec = line(rest), line(f"{rest} {stack}")
    assert found.model == with_spec.model
    assert found.model.experts.layers == {4}
    assert [units for _, units in found.model.unlike] == [0, 0, 1024, 0, 0, 0]
    assert line("--hybrid-attention-ratio 0.5").model == line(f"--hybrid-attention-ratio 0.5 {stack}").model
    assert line("--num-experts 4").model.unlike == ()
