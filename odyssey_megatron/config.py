"""``OdysseyConfig``: the single source of all flags, environment variables, defaults and help texts."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from itertools import pairwise
from typing import Any

from odyssey_megatron.errors import ConfigError
from odyssey_megatron.faults import INJECTION_POINTS, Fault, Slowdown, SlowLink, parse_injections
from odyssey_megatron.inputs import Between, Parser, nearest

MODES = ("off", "observe", "recover")
LAYOUTS = ("megatron", "spread", "auto")
REDUNDANCIES = ("off", "state", "compute", "auto")
SPARE_STATES = ("device", "host")
SHRINKS = ("auto", "off")
REBALANCES = ("off", "auto")
SEQUENCE_BALANCES = ("off", "auto")
INTERRUPTED_STEPS = ("resume", "redo")
DEVICES = ("cuda", "cpu")
BACKENDS = ("auto", "gloo")
ON_SIGTERM = ("auto", "save", "leave", "stop")

_OTHER_VARIABLES = frozenset(
    f"ODYSSEY_{one}"
    for one in (
        "TOKEN",
        "PAGE_TOKEN",
        "PRELOAD",
        "JOB",
        "PARENT_PID",
        "HEARTBEAT",
        "SLOT",
        "INCARNATION",
        "CELL_SIZE",
    )
)
"""Variables that are no settings: secrets, a flag of the launcher's, and what an agent tells its ranks."""


def policies() -> tuple[str, ...]:
    """Return the values of ``--odyssey-policy``: ``auto``, and each policy that may be asked for by name."""
    # Imported here, so that a command that only reads a journal does not wait for the planner.
    from odyssey_megatron.policy.policies import POLICIES

    return ("auto", *(one.name for one in POLICIES if one.by_flag))


LIMIT_S = Between(0.001, 1e6)
"""The range of times to wait: not too short for a clock, and not too long for a system call."""
HEARTBEAT_S = Between(0.001, 1.0)
"""The range of heartbeats. With longer ones a rank would take each pause between two of them for a time in which it
was stopped (``launch/rank/attention.py``), and never find that its training thread is stuck.
"""
LEASE_S = Between(0.5, 1e6)
"""The range of leases. The coordinator looks every 0.1 s and a little: half of a shorter lease could pass between two
looks. It would then take itself to have been stopped (``launch/wire/awake.py``), and never find a node silent.
"""
EXPECTED_S = Between(1e-9, 1e10)
"""The range of times that only enter calculations."""


def _flag(default: Any, help_text: str, **extra: Any) -> Any:
    """Return a dataclass field for a setting.

    Args:
        extra: ``within`` is the range of allowed numbers; by default a float is a time to wait, in seconds, and an int
            a count of at least one. ``choices`` are the allowed words, or a function that returns them. ``bare`` is
            the value of a flag that is given without one. ``flag`` is its name, if that does not follow from the field.
    """
    if type(default) in (int, float):
        extra.setdefault("within", LIMIT_S if type(default) is float else Between(1, 1_000_000, whole=True))
    return field(default=default, metadata={"help": help_text, **extra})


@dataclass(frozen=True, slots=True, kw_only=True)
class OdysseyConfig:
    """All settings of a job.

    The field ``some_name`` is set by the flag ``--odyssey-some-name`` or the environment variable
    ``ODYSSEY_SOME_NAME``; the flag wins. ``mode`` is set by ``--odyssey`` or ``ODYSSEY``.
    """

    mode: str = _flag(
        "off",
        "what Odyssey does in an unmodified Megatron-LM job. recover: the job survives failures (also when the flag "
        "has no value). observe: it logs what it would do, and changes nothing",
        choices=MODES,
        flag="--odyssey",
        bare="recover",
    )
    policy: str = _flag(
        "auto",
        "how a job recovers. reroute: other holders take the lost microbatches. replan: layers move to new pipelines. "
        "auto: whichever trains the most tokens",
        choices=policies,
    )
    device: str = _flag("cuda", "cpu runs Megatron on CPU tensors and gloo", choices=DEVICES)
    backend: str = _flag(
        "auto",
        "what ranks communicate by. auto: NCCL between GPUs, gloo between CPUs. gloo: also between GPUs, through "
        "their hosts' memory. That is slow, but lets several ranks share a GPU, which NCCL refuses",
        choices=BACKENDS,
    )
    float64: str = _flag("off", "train in float64, to prove exactness", choices=("off", "on"))
    run_dir: str = _flag("odyssey-run", "folder for the journal, the profile and the report")
    bind: str = _flag(
        "",
        "address at which the first node (with --odyssey-job-host: the machine of odyssey host) listens for the other "
        "nodes; by default that of --master-addr",
    )
    job_host: str = _flag(
        "",
        "HOST:PORT of odyssey host, which runs the coordinator and the store in place of the first node, so that "
        "the job survives the loss of any node. That machine needs no GPU",
    )
    inject: str = _flag(
        "",
        "faults to inject, ';'-separated: 'rank=5,step=7,at=backward[,signal=STOP, STUCK or "
        "FULL][,microbatch=3][,generation=2][,incarnation=1]'; FULL: no memory is left; incarnation=1: not the rank's "
        "first process, which is meant otherwise, but the one that takes its place; steps and microbatches count from "
        "0, so that step 7 is Megatron's iteration 8, and an evaluation or checkpoint behind iteration 7 has step 7; "
        "at is one of "
        + ", ".join(INJECTION_POINTS)
        + "; exchange comes before a measured step (--odyssey-profile-steps) with --odyssey-time-links on, and "
        "param_gather behind a step with cut optimizer state (--use-distributed-optimizer). "
        "'rank=5,step=20,slow=2.0,until=60': in steps 20 to 59 its layers take twice the time; "
        "'link=3>5,step=20,slow=4,until=60': messages from rank 3 to rank 5 take four times theirs (both on the CPU "
        "device). Faults that did not strike are named at the job's end, and by odyssey report",
    )
    accept: str = _flag(
        "",
        "flags that Odyssey does not know and should let pass, separated by commas and without their dashes: those "
        "of a newer Megatron-LM, or of a fork",
    )
    strict: str = _flag(
        "off",
        "a flag of Megatron-LM's that changes nothing with --odyssey is refused, not ignored (also when this flag has "
        "no value)",
        choices=("off", "on"),
        bare="on",
    )
    layout: str = _flag(
        "megatron",
        "the layout that the job starts with. megatron: the stages and pipelines of the launch line. spread: the "
        "same, but with the replicas of a stage on different nodes, so that the job survives the loss of a node; "
        "Megatron puts them side by side. Gradients are then summed between nodes. auto: the best pipelines for the "
        "profile, if they are faster and survive the loss of one worker as before (with "
        "--use-distributed-optimizer, of --odyssey-redundancy-level ones), fewer pipelines with second holders among "
        "them; spread where the loss of a node would end the job. Once costs are measured the job moves in the "
        "background to a layout that is 3 % faster by them, if there is one",
        choices=LAYOUTS,
    )
    redundancy: str = _flag(
        "off",
        "state: a layer with a single holder gets a second one, which computes nothing but stays current, so that "
        "the job survives any single loss, also without data parallelism. compute: in addition, holders run "
        "forwards ahead in the pipeline's bubbles for the workers that they would replace. auto: whichever costs "
        "least at the rate of failures",
        choices=REDUNDANCIES,
    )
    redundancy_level: int = _flag(
        1,
        "number of holders of a layer that may be lost at once: any of them with --odyssey-redundancy state, "
        "compute or auto, and those that keep a slice of its optimizer state with --use-distributed-optimizer",
    )
    spare_state: str = _flag(
        "device",
        "where spare optimizer state lies between steps, that is, state that only a failure needs: second copies of "
        "slices (--use-distributed-optimizer) and the state of shadows. host: it comes to the device layer by layer "
        "for the optimizer's step",
        choices=SPARE_STATES,
    )
    respawn: int = _flag(
        0,
        "how often in a day each dead rank is started again, to join the running job (0: never, but by odyssey "
        "readmit)",
        within=Between(0, 1_000_000, whole=True),
    )
    shrink: str = _flag(
        "auto",
        "when one rank of a tensor-, context- or expert-parallel cell is dead and not started again, the others join "
        "as a smaller cell, and train where that pays. So does a cell that one slow rank holds up, without that rank "
        "(--odyssey-rebalance auto with --odyssey-respawn). off: they stand by until the cell can be whole again, or "
        "without --odyssey-respawn leave",
        choices=SHRINKS,
    )
    rebalance: str = _flag(
        "off",
        "what is done about workers that are slow by the ranks' measurements. auto: between two steps they get less "
        "work where that pays, and their own share back once they have recovered. off: the log only says what that "
        "would gain",
        choices=REBALANCES,
    )
    sequence_balance: str = _flag(
        "off",
        "auto: with packed sequences, each step's microbatches are dealt to the pipelines by their expected cost, "
        "so that the slowest pipeline takes as little time as possible. The global batch and its loss do not change",
        choices=SEQUENCE_BALANCES,
    )
    time_links: str = _flag(
        "off",
        "on: before each measured step (--odyssey-profile-steps) workers that are neighbours in pipelines exchange "
        "test messages, so that slow links are found as well",
        choices=("off", "on"),
    )
    page_port: int = _flag(
        0,
        "port at which the first node serves a page that follows the job (0: none)",
        within=Between(0, 65_535, whole=True),
    )
    metrics_port: int = _flag(
        0,
        "port at which the first node serves metrics for Prometheus, at /metrics (0: none); needs prometheus_client",
        within=Between(0, 65_535, whole=True),
    )
    page_bind: str = _flag(
        "127.0.0.1",
        "address that the page and the metrics are served at. Beyond loopback every visitor needs a token, which "
        "the log names",
    )
    interrupted_step: str = _flag(
        "resume",
        "the step in which a rank is lost. resume: survivors keep what they have done, and only the lost rank's "
        "part is done again; for that, messages stay in memory until the step's end, unless that would cost more "
        "than it saves, which the log says. redo: all do the whole step again",
        choices=INTERRUPTED_STEPS,
    )
    on_sigterm: str = _flag(
        "auto",
        "what 'odyssey run' does at SIGTERM, SIGINT, SIGHUP, SIGUSR1 or SIGUSR2; a second signal ends the job at "
        "once. save: all ranks end after the same step, with a checkpoint if --save is given. leave: this node's "
        "ranks leave after their step, or at once at the second signal, and the others go on; as save if these cannot "
        "do without. stop: the job ends at once. auto: save if --save is given, else stop",
        choices=ON_SIGTERM,
    )
    memory_headroom_percent: int = _flag(
        10,
        "share of a GPU's memory that no plan may use (in percent). With a profile (--odyssey-profile, or --profile "
        "and --fit of 'odyssey plan' without --gpu-memory-gib) plans may use what it says, if it says any",
        within=Between(1, 99, whole=True),
    )
    slower_for_memory_percent: float = _flag(
        0.2,
        "how much longer a step may take if that leaves the fullest GPU more memory (in percent; 0: none). Among "
        "schedules of a layout, and at the start among layouts, that are this close to the fastest, the one that "
        "needs the least memory is taken. After a loss, when ranks wait for the plan, this is done from 0.5 on",
        within=Between(0, 100),
    )
    profile: str = _flag("", "file (JSON) with the profile to start from, in place of estimated layer costs")
    profile_steps: int = _flag(5, "number of steps from one measurement of costs to the next")
    trace_steps: int = _flag(
        2,
        "number of steps in each generation whose executed schedule goes into the journal",
        within=Between(0, 1_000_000, whole=True),
    )
    horizon_s: float = _flag(
        3600.0, "score plans by the tokens expected within this time (in seconds)", within=EXPECTED_S
    )
    mtbf_s: float = _flag(
        21600.0, "prior mean time between failures of the whole job (in seconds)", within=EXPECTED_S
    )
    restart_s: float = _flag(
        0.0,
        "cost of a restart from a checkpoint, including the steps that are done again (in seconds): the price of a "
        "layout whose next loss ends the job. 0: the time that this job's own start took, at least 100 s, plus half "
        "of the time between two checkpoints, or all the time trained so far without --save",
        within=Between(0, 1e9),
    )
    heartbeat_s: float = _flag(
        0.05, "interval of the heartbeat of each rank (in seconds)", within=HEARTBEAT_S
    )
    hang_s: float = _flag(
        5.0,
        "a rank without a heartbeat for this long is killed (in seconds), unless it works all the while, in code that "
        "keeps Python's lock: then --odyssey-op-timeout-s is the limit",
    )
    node_lease_s: float = _flag(
        3.0, "a node whose agent is silent for this long is lost (in seconds)", within=LEASE_S
    )
    build_timeout_s: float = _flag(5.0, "limit for connecting the groups of a generation (in seconds)")
    op_timeout_s: float = _flag(
        60.0, "limit for one message, collective or other instruction of a step (in seconds)"
    )
    recovery_timeout_s: float = _flag(30.0, "limit for agreeing on a new generation (in seconds)")
    store_timeout_s: float = _flag(
        120.0,
        "limit for the first contact of all ranks, and the age up to which a rank killed before it is started anew (in "
        "seconds)",
    )

    def __post_init__(self) -> None:
        _check(self)

    @property
    def given(self) -> list[str]:
        """The flags of the settings that are not the defaults."""
        return [flag_of(one) for one in fields(self) if getattr(self, one.name) != one.default]

    @property
    def least_holders(self) -> int:
        """The least number of holders of each layer; see ``JobSpec.least_holders``."""
        return 0 if self.redundancy == "off" else 1 + self.redundancy_level

    @property
    def is_strict(self) -> bool:
        """Whether flags of Megatron-LM's that change nothing are refused."""
        return self.strict == "on"

    @property
    def optimizer_copies(self) -> int:
        """``JobSpec.optimizer_copies`` of a job with a distributed optimizer."""
        return 1 + self.redundancy_level

    def without_effect(self, *, distributed: bool) -> Iterator[tuple[str, str]]:
        """Yield each of Odyssey's flags that is given and changes nothing, with the reason.

        Args:
            distributed: whether optimizer state is cut into slices.
        """
        if self.redundancy == "off" and not distributed:
            why = "--odyssey-redundancy is off, and without --use-distributed-optimizer all holders keep all"
            if self.redundancy_level != 1:
                yield "--odyssey-redundancy-level", why
            if self.spare_on_host:
                yield "--odyssey-spare-state", why
        if self.mode == "observe" and self.respawn:
            yield "--odyssey-respawn", "--odyssey observe ends the job with its first loss"

    @property
    def spare_on_host(self) -> bool:
        """Whether optimizer state that is only kept for a failure lies in host memory between steps."""
        return self.spare_state == "host"

    @property
    def slower_for_memory(self) -> float:
        """The value of ``JobSpec.slower_for_memory``."""
        return self.slower_for_memory_percent / 100

    @property
    def eager_forwards(self) -> bool:
        """Whether eager forwards are asked for; see ``JobSpec.eager_forwards``."""
        return self.redundancy == "compute"

    @property
    def resumes_steps(self) -> bool:
        """Whether an interrupted step goes on, for which messages stay in memory until a step's end."""
        return self.interrupted_step == "resume"

    @property
    def uses_nccl(self) -> bool:
        """Whether NCCL connects the ranks; otherwise gloo does."""
        return self.device == "cuda" and self.backend == "auto"

    @property
    def accepted(self) -> frozenset[str]:
        """The flags listed in ``accept``, without their dashes."""
        return frozenset(one.strip().removeprefix("--") for one in self.accept.split(",") if one.strip())

    @property
    def injections(self) -> tuple[Fault, ...]:
        """The faults in ``inject``, parsed."""
        return parse_injections(self.inject)


BEHIND_SCRIPT = "what is before the script is for the launcher, and Odyssey's flags come behind the script"


def flag_of(setting: Field[Any]) -> str:
    """Return the command-line flag of a setting."""
    return str(setting.metadata.get("flag", "--odyssey-" + setting.name.replace("_", "-")))


def variable_of(setting: Field[Any]) -> str:
    """Return the environment variable of a setting."""
    return flag_of(setting).removeprefix("--").replace("-", "_").upper()


def strange_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return each ``ODYSSEY_…`` variable that is not known, with the setting's variable that may be meant, or ""."""
    settings = [variable_of(one) for one in fields(OdysseyConfig)]
    strange = {one for one in environ if one.startswith("ODYSSEY_")} - {*settings, *_OTHER_VARIABLES}
    return {one: nearest(one, settings) for one in sorted(strange)}


def choices_of(setting: Field[Any]) -> tuple[str, ...]:
    """Return the words that a setting may be; an empty tuple if it may be any."""
    choices = setting.metadata.get("choices", ())
    return tuple(choices() if callable(choices) else choices)


def _check(config: OdysseyConfig) -> None:
    for one in fields(config):
        value, choices = getattr(config, one.name), choices_of(one)
        if choices and value not in choices:
            raise ConfigError(f"{flag_of(one)} {value!r} is unknown; use one of " + ", ".join(choices) + ".")
        if "within" in one.metadata:
            try:
                one.metadata["within"].check(value)
            except ValueError as error:
                raise ConfigError(f"{flag_of(one)}: {error}.") from None
    if config.eager_forwards and not config.resumes_steps:
        raise ConfigError(
            "--odyssey-redundancy compute saves parts of an interrupted step, which --odyssey-interrupted-step "
            f"{config.interrupted_step} gives up. Use --odyssey-interrupted-step resume, or --odyssey-redundancy state."
        )
    if config.mode == "observe" and config.inject:
        raise ConfigError(
            "--odyssey observe injects no faults: --odyssey-inject would do nothing. Leave it out, and kill a rank of "
            "the running job with 'odyssey inject RUN_DIR --rank N'."
        )
    if config.device != "cpu" and any(isinstance(one, (Slowdown, SlowLink)) for one in config.injections):
        raise ConfigError(
            "--odyssey-inject slow=... takes up the time of a CPU, or holds messages back there; on a GPU nothing "
            "would take longer by it. Use --odyssey-device cpu, or lower the clock of the GPU (nvidia-smi "
            "--lock-gpu-clocks), or the rate of the network (tc qdisc)."
        )
    # Each limit must be able to expire before the next one, which would hide it.
    chain = ("heartbeat_s", "hang_s", "op_timeout_s")
    for shorter, longer in pairwise(chain):
        low, high = getattr(config, shorter), getattr(config, longer)
        if low >= high:
            raise ConfigError(
                f"--odyssey-{shorter.replace('_', '-')} ({low} s) must be below "
                f"--odyssey-{longer.replace('_', '-')} ({high} s)."
            )
    parse_injections(config.inject)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the ``--odyssey-…`` flags, without defaults, so that environment variables can supply values."""
    group = parser.add_argument_group("odyssey")
    for one in fields(OdysseyConfig):
        default = one.default if one.default != "" else "none"
        group.add_argument(
            flag_of(one),
            dest="odyssey_" + one.name,
            type=_kind(one),
            default=argparse.SUPPRESS,
            metavar="|".join(choices_of(one)) or None,
            help=f"{one.metadata['help']} (default: {default})".replace("%", "%%"),
            nargs="?" if "bare" in one.metadata else None,
            const=one.metadata.get("bare"),
        )


def _kind(setting: Field[Any]) -> Any:
    """Return the callable that reads a setting's value: a range of numbers, or ``str``."""
    return setting.metadata.get("within", str)


def config_from(namespace: argparse.Namespace, environ: Mapping[str, str] | None = None) -> OdysseyConfig:
    """Return the settings from parsed flags, else ``ODYSSEY_…`` variables, else defaults. Raises ConfigError."""
    environ = os.environ if environ is None else environ
    values: dict[str, Any] = {}
    for one in fields(OdysseyConfig):
        variable, kind = variable_of(one), _kind(one)
        if hasattr(namespace, "odyssey_" + one.name):
            values[one.name] = getattr(namespace, "odyssey_" + one.name)
        elif variable in environ:
            try:
                values[one.name] = kind(environ[variable])
            except argparse.ArgumentTypeError as error:
                raise ConfigError(f"the variable {variable}: {error}.") from None
    return OdysseyConfig(**values)


def config_from_argv(argv: Sequence[str], environ: Mapping[str, str] | None = None) -> OdysseyConfig:
    """Return the settings given among the arguments of a training script, whose other flags are ignored.

    Args:
        environ: as in :func:`config_from`.

    Raises:
        ConfigError: a setting is wrong, or an ``--odyssey-…`` flag is unknown.
    """
    parser = Parser(prog="odyssey run", add_help=False, allow_abbrev=False)
    add_arguments(parser)
    namespace, rest = parser.parse_known_args(list(argv))
    unknown = [one for one in rest if one.startswith("--odyssey-")]
    if unknown:
        known = [flag_of(one) for one in fields(OdysseyConfig)]
        meant = nearest(unknown[0].partition("=")[0], known)
        raise ConfigError(
            f"unknown flag {unknown[0]}; "
            + (f"is {meant} meant?" if meant else f"known: {', '.join(known)}.")
        )
    return config_from(namespace, environ)
