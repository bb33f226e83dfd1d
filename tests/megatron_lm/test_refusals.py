"""What cannot work under failure is refused before anything is trained: exit code 2, and one message."""

from __future__ import annotations

import importlib.util
import json

import pytest

from odyssey_megatron import patch
from odyssey_megatron.doctor.launch_line import judged
from odyssey_megatron.upstream.refusals import REFUSALS
from odyssey_megatron.upstream.source import Source
from tests.launch.jobserver import CHECKOUT
from tests.megatron_lm.jobs import MOCK, MODEL

GIVEN = {
    "--fp8-recipe": "--fp8-format hybrid",
    "--fp8-output-proj": "--fp8-format hybrid --fp8-recipe mxfp8 --fp8-output-proj",
    "--fp8-quantizer-factory": "--fp8-quantizer-factory mine.factory",
    "--fp4-format": "--fp4-format e2m1",
    "--te-precision-config-file": "--te-precision-config-file precision.yaml",
    "--kitchen-config-file": "--kitchen-config-file kitchen.yaml",
    "--kitchen-recipe-number": "--kitchen-recipe-number 0",
    "--qk-clip": "--qk-clip",
    "--use-precision-aware-optimizer": "--use-precision-aware-optimizer",
    "--main-params-dtype": "--main-params-dtype fp16",
    "--exp-avg-dtype": "--exp-avg-dtype fp8",
    "--exp-avg-sq-dtype": "--exp-avg-sq-dtype fp16",
    "--mtp-standalone": "--mtp-standalone",
    "--mtp-use-repeated-layer": "--mtp-use-repeated-layer",
    "--pipeline-model-parallel-layout": "--mtp-num-layers 1 --pipeline-model-parallel-layout Et|tt|tm|L",
    "--mtp-detach-heads": "--mtp-detach-heads",
    "--use-megatron-fsdp": "--use-megatron-fsdp",
    "--use-torch-fsdp2": "--use-torch-fsdp2",
    "--use-legacy-models": "--use-legacy-models",
    "--dataloader-type": "--dataloader-type external",
    "--non-persistent-ckpt-type local": "--non-persistent-ckpt-type local",
    "--inprocess-restart": "--inprocess-restart",
    "--enable-ft-package": "--enable-ft-package",
    "--skip-train": "--skip-train",
    "--perform-rl-step": "--perform-rl-step",
    "--sft": "--sft",
    "--save-wgrads-interval": "--save-wgrads-interval 2",
    "--save-dgrads-interval": "--save-dgrads-interval 2",
    "--optimizer": "--optimizer soap",
    "--muon-tp-mode": "--muon-tp-mode duplicated --optimizer muon --tensor-model-parallel-size 2",
    "--muon-scalar-optimizer": "--muon-scalar-optimizer lion --optimizer muon",
    "--hybrid-layer-pattern": "--hybrid-layer-pattern M*M*",
    "--tensor-parallel-num-weight-shards": "--tensor-parallel-num-weight-shards 2",
    "--freeze-all-layers": "--freeze-all-layers",
    "--logits-save-dir": "--logits-save-dir there",
    "--logits-load-dir": "--logits-load-dir there",
    "--eval-micro-batch-size": "--eval-micro-batch-size 2 --num-experts 4 --moe-expert-capacity-factor 1.0",
    "--dataloader-inter-document-masking": (
        "--dataloader-inter-document-masking --spec megatron.core.models.mamba.mamba_layer_specs mamba_stack_spec"
    ),
    "--ckpt-convert-format": "--ckpt-convert-format torch_dist",
    "--save-params-interval": "--save-params-interval 2",
    "--save-activations-interval": "--save-activations-interval 2",
    "--use-kitchen-attention": "--use-kitchen-attention",
    "--symmetric-ar-type": "--symmetric-ar-type two_shot",
    "--use-grouped-gemm-for-dense-mlp": "--use-grouped-gemm-for-dense-mlp",
    "--mla-down-proj-fusion": "--mla-down-proj-fusion",
    "--fused-residual-rmsnorm": "--fused-residual-rmsnorm",
    "--batch-invariant-mode": "--batch-invariant-mode",
    "--fp32-residual-connection": "--fp32-residual-connection",
    "--distribute-saved-activations": "--distribute-saved-activations",
    "--hybrid-context-parallel": "--hybrid-context-parallel",
    "--position-embedding-type": "--position-embedding-type relative",
    "--hybrid-override-pattern": "--hybrid-override-pattern M*M*",
    "--mtp-hybrid-override-pattern": "--mtp-hybrid-override-pattern M*",
    "--is-hybrid-model": "--is-hybrid-model",
    "--linear-attention-freq": "--linear-attention-freq 2",
    "--experimental-attention-variant": "--experimental-attention-variant gated_delta_net",
    "--spec": "--spec a b",
    "--no-initialization": "--no-initialization",
    "--init-model-with-meta-device": "--init-model-with-meta-device",
    "--export-kd-cfg": "--export-kd-cfg kd.yaml",
    "--export-kd-teacher-load": "--export-kd-teacher-load there",
    "--export-quant-cfg": "--export-quant-cfg fp8",
    "--export-offline-model": "--export-offline-model",
    "--export-te-mcore-model": "--export-te-mcore-model",
    "--export-legacy-megatron": "--export-legacy-megatron",
    "--modelopt-enabled": "--modelopt-enabled",
    "--enable-gpt-oss": "--enable-gpt-oss",
    "--cpu-offloading-num-layers": "--cpu-offloading-num-layers 2",
    "--fine-grained-activation-offloading": "--fine-grained-activation-offloading",
    "--optimizer-cpu-offload": "--optimizer-cpu-offload",
    "--ddp-param-name-patterns-for-fp32-local-accumulation": (
        "--ddp-param-name-patterns-for-fp32-local-accumulation all"
    ),
    "--dump-param-to-param-group-map": "--dump-param-to-param-group-map there",
    "--check-for-large-grads": "--check-for-large-grads",
    "--result-rejected-tracker-filename": "--result-rejected-tracker-filename there",
    "--check-for-spiky-loss": "--check-for-spiky-loss",
    "--decrease-batch-size-if-needed": "--decrease-batch-size-if-needed --rampup-batch-size 4 4 24",
    "--ckpt-fully-parallel-save-process-group": "--ckpt-fully-parallel-save-process-group ep_dp",
    "--ckpt-fully-parallel-load-process-group": "--ckpt-fully-parallel-load-process-group ep_dp",
    "--dist-ckpt-save-pre-mcore-014": "--dist-ckpt-save-pre-mcore-014",
    "--override-ckpt-iteration": "--override-ckpt-iteration 2",
    "--load-main-params-from-ckpt": "--load-main-params-from-ckpt",
    "--use-mp-args-from-checkpoint-args": "--use-mp-args-from-checkpoint-args",
    "--fault-injector-ranks": "--fault-injector-ranks 1",
    "--fault-injector-num-ranks": "--fault-injector-num-ranks 1",
    "--adlr-autoresume": "--adlr-autoresume",
    "--distributed-timeout-seconds-after-init": "--distributed-timeout-seconds-after-init 60",
    "--fake-process-group": "--fake-process-group",
    "--lazy-mpu-init": "--lazy-mpu-init",
    "--config-logger-dir": "--config-logger-dir there",
    "--log-energy": "--log-energy",
    "--log-straggler": "--log-straggler",
    "--gpu-sniff-test-interval": "--gpu-sniff-test-interval 2",
    "--run-workload-inspector-server": "--run-workload-inspector-server",
    "--expert-tensor-parallel-num-weight-shards": "--expert-tensor-parallel-num-weight-shards 2 --num-experts 4",
    "--pipeline-model-parallel-size": "--pipeline-model-parallel-size 5",
    "--no-pad-vocab-size": "--no-pad-vocab-size",
    "--recompute-modules": "--recompute-granularity selective --recompute-modules core_attn mlp",
    "--expert-tensor-parallel-size": "--expert-tensor-parallel-size 2 --num-experts 4",
    "--moe-grouped-gemm": "--moe-grouped-gemm --num-experts 4",
    "--moe-enable-routing-replay": "--moe-enable-routing-replay --num-experts 4",
    "--moe-expert-rank-capacity-factor": "--moe-expert-rank-capacity-factor 2.0 --num-experts 4",
    "--moe-latent-size": "--moe-latent-size 16 --num-experts 4",
    "--moe-mlp-glu-interleave-size": "--moe-mlp-glu-interleave-size 4 --num-experts 4",
    "--moe-paged-stash": "--moe-paged-stash --num-experts 4",
    "--moe-router-force-biased": "--moe-router-force-biased 1.0 --num-experts 4",
    "--moe-router-load-balancing-type": "--moe-router-load-balancing-type global_aux_loss --num-experts 4",
    "--moe-routing-trace-path": "--moe-routing-trace-path there --num-experts 4",
    "--moe-shared-expert-glu-interleave-size": "--moe-shared-expert-glu-interleave-size 4 --num-experts 4",
    "--moe-single-grouped-bias": "--moe-single-grouped-bias --num-experts 4",
    "--moe-single-grouped-weight": "--moe-single-grouped-weight --num-experts 4",
    "--moe-use-legacy-grouped-gemm": "--moe-use-legacy-grouped-gemm --num-experts 4",
    "--moe-use-upcycling": "--moe-use-upcycling --num-experts 4",
    "--save-tokens-per-expert-interval": "--save-tokens-per-expert-interval 2 --num-experts 4",
    "--use-grouped-gemm-for-shared-expert": "--use-grouped-gemm-for-shared-expert --num-experts 4",
}
"""As a launch line has them. That of --yaml-cfg is a job of its own below."""


UNKNOWN = "unknown"


def assert_refused(jobs):
    """Each flag that this Megatron-LM knows is refused, by its name and with its remedy, and by the doctor, too, who
    has not Megatron's parser. Returns the others.
    """
    cases, out = jobs.folder / "cases.json", jobs.folder / "refused.json"
    # Some flags are refused with biases only.
    usual = [one for one in (*MODEL.split(), MOCK) if one != "--disable-bias-linear"]
    cases.write_text(
        json.dumps({"none": usual} | {flag: [*usual, *given.split()] for flag, given in GIVEN.items()})
    )
    jobs.script([str(CHECKOUT / "tests/megatron_lm/refuse.py"), str(cases), str(out)])
    said, version = json.loads(out.read_text()), Source((jobs.checkout,)).version()
    assert said.pop("none") is None
    unknown = {flag for flag, text in said.items() if text == UNKNOWN}
    for flag, text in said.items():
        # A flag may be refused for several reasons, some of them in a few versions only.
        reasons = [one for one in REFUSALS if one.flag == flag and one.holds_in(str(version))]
        if not reasons:
            assert text is None, flag
        elif flag not in unknown:
            assert text is not None, flag
            assert text.startswith(flag)
            assert text.endswith(tuple(one.remedy for one in reasons))
            assert "\n" not in text
            assert set(judged([*usual, *GIVEN[flag].split()], version).refused) == {flag}
    assert len(unknown) < len(GIVEN) / 2
    return unknown


def assert_recorded(jobs):
    """``patches/<tag>/arguments.txt`` is what the version's own parser says today."""
    now, version = jobs.folder / "arguments.txt", Source((jobs.checkout,)).version()
    jobs.script([str(CHECKOUT / "tests/megatron_lm/record_arguments.py"), str(now)])
    (tag,) = (one.tag for one in patch.supported() if one.version == version)
    assert now.read_text() == (patch.data() / tag / "arguments.txt").read_text(), (
        f"record it anew (tests/megatron_lm/record_arguments.py), and put what is new on a list: {now}"
    )


def test_every_refused_flag_is_tried():
    assert set(GIVEN) | {"--yaml-cfg"} == {one.flag for one in REFUSALS}


def test_a_refusal_names_flag_and_remedy(jobs):
    assert_refused(jobs)
    assert_recorded(jobs)


def test_a_job_names_all_refused_flags_at_once(jobs, name):
    """Among them one that Megatron's own validation would stop at."""
    flags = f"{MOCK} --qk-clip --log-straggler --dataloader-type external --use-megatron-fsdp"
    run = jobs.odyssey(name, flags, ranks=4, stages=2)
    assert run.exit_code == 2, run.log[-3000:]
    assert "Traceback" not in run.log
    assert run.log.count("4 of the job's flags cannot be used:") == 1
    for flag in ("--qk-clip", "--log-straggler", "--dataloader-type external", "--use-megatron-fsdp"):
        assert run.log.count(f"\n{flag}") == 1, flag


def test_with_strict_what_would_be_ignored_is_refused(jobs, name):
    flags = f"{MOCK} --odyssey-strict --overlap-grad-reduce --rerun-mode validate_results"
    run = jobs.odyssey(name, flags, ranks=4, stages=2)
    assert run.exit_code == 2, run.log[-3000:]
    assert run.log.count("--overlap-grad-reduce changes nothing with --odyssey: ") == 1
    assert run.log.count("changes nothing") == 1
    assert not run.iterations


def test_what_megatron_asserts_is_one_message(jobs, name):
    run = jobs.odyssey(name, f"{MOCK} --fp16 --bf16", ranks=4, stages=2)
    assert run.exit_code == 2, run.log[-3000:]
    assert "Traceback" not in run.log
    assert run.log.count("Megatron-LM itself refuses these flags (arguments.py, line") == 1
    assert "assert not args.bf16" in run.log


def test_a_schedule_that_megatron_refuses_is_one_message_with_what_it_asserts(jobs, name):
    run = jobs.odyssey(name, f"{MOCK} --lr-warmup-iters 6", ranks=2, stages=2)
    assert run.exit_code == 2, run.log[-3000:]
    assert run.log.count("Megatron refuses this learning rate schedule: assert self.lr_warmup_steps <") == 1


def test_a_batch_that_replicas_cannot_share_out_is_one_message(jobs, name):
    """Megatron asserts that where it makes its calculator of microbatches."""
    run = jobs.odyssey(name, f"{MOCK} --global-batch-size 13", ranks=4, stages=2)
    assert run.exit_code == 2, run.log[-3000:]
    assert "Traceback" not in run.log
    assert run.log.count("Megatron-LM itself refuses these flags (num_microbatches_calculator.py, line") == 1
    assert "(13) is not divisible by micro batch size (1) times data parallel size (2)" in run.log


@pytest.mark.parametrize("called", ["pretrain_t5.py", "mine.py"])
def test_a_script_that_trains_something_else_ends_with_one_message(jobs, name, called, tmp_path):
    """By its name, or by the model that it builds."""
    script = tmp_path / called
    found = f"import sys\nsys.path.insert(0, {str(jobs.checkout)!r})\n"
    script.write_text(found + (jobs.checkout / "pretrain_t5.py").read_text())
    how = {"ranks": 2, "stages": 1, "without": "--group-query-attention --num-query-groups"}
    run = jobs.odyssey(name, f"{MOCK} --decoder-seq-length 16", script=str(script), **how)
    assert run.exit_code == 2, run.log[-3000:]
    said = {
        "pretrain_t5.py": "pretrain_t5.py does not work with --odyssey: it trains an encoder and a decoder",
        "mine.py": "the script's model is a T5Model, not one row of layers",
    }
    assert run.log.count(said[called]) == 1, run.log[-3000:]
    assert "Traceback" not in run.log
    assert not run.iterations


def test_fp8_without_transformer_engine_is_refused(jobs, name):
    """Megatron would train in bf16, and not say so."""
    flags = f"{MOCK} --bf16 --fp8-format hybrid --fp8-recipe tensorwise"
    run = jobs.odyssey(name, flags, ranks=4, stages=2)
    assert run.exit_code == 2, run.log[-3000:]
    assert "Traceback" not in run.log
    assert run.log.count("fp8 needs Transformer Engine 2.3 or newer") == 1
    assert not run.iterations


@pytest.mark.parametrize("flag", ["--qk-clip", "--yaml-cfg", "--inprocess-restart", "--enable-ft-package"])
def test_a_refused_job_ends_with_one_message(jobs, name, flag):
    (refusal,) = (one for one in REFUSALS if one.flag == flag)
    yaml = jobs.folder / f"{name}.yaml"
    yaml.write_text("enable_msc: true\ninprocess_restart: false\n")
    more = f" --yaml-cfg {yaml}" if flag == "--yaml-cfg" else f" {flag}"
    run = jobs.odyssey(name, MOCK + more, ranks=4, stages=2)
    assert run.exit_code == 2, run.log[-3000:]
    assert "Traceback" not in run.log
    assert run.log.count(refusal.remedy) == 1, run.log[-3000:]
    assert not run.iterations


@pytest.mark.skipif(importlib.util.find_spec("emerging_optimizers") is not None, reason="it is installed")
def test_muon_without_the_package_that_it_is_in(jobs, name):
    run = jobs.odyssey(name, f"{MOCK} --optimizer muon", ranks=2, stages=1)
    assert run.exit_code == 2, run.log[-3000:]
    assert (
        "--optimizer muon is in NVIDIA's package emerging_optimizers, which this Megatron does not" in run.log
    )
