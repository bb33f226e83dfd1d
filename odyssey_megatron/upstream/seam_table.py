"""The table of all seams that Odyssey uses. A row is added with the code that needs it, and compared with each tag's
source (``tests/doctor/test_seam_table.py``, with the checkouts that it is given).
"""

from __future__ import annotations

from odyssey_megatron.upstream.cpu_seams import CPU_SEAMS
from odyssey_megatron.upstream.hybrid_seams import HYBRID_SEAMS
from odyssey_megatron.upstream.seams import Seam

_ALONE = "the groups span ranks, which come and go, so Odyssey makes them"
_WHOLE = "a save is complete or it is not there, whoever dies in it"
_CONTEXT = "context-parallel groups have the ranks of a cell, and no other of Megatron's is across contexts"
_GLOBAL = "a data-parallel collective of Megatron's own must fail loudly where gradients are reduced by the schedule"

# -- replaced, in megatron.training: the loop stays Megatron's -------------------------------------------------------

PRETRAIN = Seam(
    target="megatron.training.training:pretrain",
    why="joins the job before Megatron does anything, and leaves it afterwards",
    signatures={"0.16": "train_valid_test_dataset_provider model_type forward_step_func"},
    open=True,
)
ADD_MEGATRON_ARGUMENTS = Seam(
    target="megatron.training.arguments:add_megatron_arguments",
    why="adds the --odyssey flags to Megatron's",
    signatures={"0.16": "parser"},
)
PARSE_AND_VALIDATE_ARGS = Seam(
    target="megatron.training.arguments:parse_and_validate_args",
    why="joins the job before Megatron acts upon any flag: the script calls this before pretrain",
    signatures={"0.16": None, "0.18": "extra_args_provider ignore_unknown_args args_defaults"},
)
VALIDATE_ARGS = Seam(
    target="megatron.training.arguments:validate_args",
    why="refuses flags that cannot survive a failure, before any GPU time is spent",
    signatures={"0.16": "args defaults"},
)
INITIALIZE_DISTRIBUTED = Seam(
    target="megatron.training.initialize:_initialize_distributed",
    why=_ALONE,
    signatures={"0.16": "get_embedding_ranks get_position_embedding_ranks store"},
    open=True,
)
SETUP_MODEL_AND_OPTIMIZER = Seam(
    target="megatron.training.training:setup_model_and_optimizer",
    why="builds the layers that the plan gives to this rank, each with its optimizer",
    signatures={
        "0.16": "model_provider_func model_type checkpointing_context",
        "0.19": "model_type model_provider_func checkpointing_context cfg_container pg_collection",
    },
)
BUILD_PRETRAINING_DATA_LOADER = Seam(
    target="megatron.training.training:build_pretraining_data_loader",
    why="reads samples by their global number, wherever a microbatch runs",
    signatures={"0.16": "dataset consumed_samples"},
)
TRAIN_STEP = Seam(
    target="megatron.training.training:train_step",
    why="a step is carried out by the plan, and repeated after a failure",
    signatures={
        "0.16": "forward_step_func data_iterator model optimizer opt_param_scheduler config forward_backward_func "
        "iteration",
        "0.19": "forward_step_func data_iterator model optimizer opt_param_scheduler config forward_backward_func "
        "iteration pg_collection p2p_communicator",
    },
)
CYCLIC_ITER = Seam(
    target="megatron.training.training:cyclic_iter",
    why="a loader's samples come again by their number",
    signatures={"0.16": "iter", "0.18": "iterable"},
)
DUMMY_TRAIN_STEP = Seam(
    target="megatron.training.training:dummy_train_step",
    why="an iteration that is skipped is a step, so that all ranks are as far",
    signatures={"0.16": "data_iterator"},
)
CONSUME_SEQLEN_STATS = Seam(
    target="megatron.training.training:consume_seqlen_stats_in_iteration",
    why="packed sequences are counted once, whoever computed which layers of them",
    signatures={"0.16": None, "0.18": ""},
)
TRAIN = Seam(
    target="megatron.training.training:train",
    why="a process in the place of a dead rank joins here, and goes on at the iteration of the others",
    signatures={
        "0.16": "forward_step_func model optimizer opt_param_scheduler train_data_iterator valid_data_iterator"
    },
    open=True,
)
TRAINING_LOG = Seam(
    target="megatron.training.training:training_log",
    why="the first iteration of a process that has joined is not the job's first",
    signatures={"0.16": "is_first_iteration"},
    open=True,
)
REDUCE_MAX_STAT = Seam(
    target="megatron.training.training:reduce_max_stat_across_model_parallel_group",
    why="all ranks know a step's numbers; behind it a message within a cell would be cut short by any failure",
    signatures={"0.16": "stat", "0.19": "stat group"},
)
NUM_FLOATING_POINT_OPERATIONS = Seam(
    target="megatron.training.training:num_floating_point_operations",
    why="what a rank that joins has not counted itself",
    signatures={"0.16": "args batch_size"},
    open=True,
)
GET_FORWARD_BACKWARD_FUNC = Seam(
    target="megatron.training.training:get_forward_backward_func",
    why="evaluation runs by the plan too",
    signatures={"0.16": "pp_size vp_size"},
    open=True,
)
SAVE_CHECKPOINT = Seam(
    target="megatron.training.checkpointing:save_checkpoint",
    why="a failure during a save repeats the save",
    signatures={"0.16": "iteration model optimizer opt_param_scheduler num_floating_point_operations_so_far"},
    open=True,
)
SHARDED_METADATA = Seam(
    target="megatron.training.checkpointing:_build_sharded_state_dict_metadata",
    why="a checkpoint says that a distributed optimizer can load it",
    signatures={"0.16": "args dp_cp_group"},
)
GENERATE_STATE_DICT = Seam(
    target="megatron.training.checkpointing:generate_state_dict",
    why="a checkpoint has the arguments of the launch line",
    signatures={"0.16": "args"},
    open=True,
)
LOAD_BASE_CHECKPOINT = Seam(
    target="megatron.training.checkpointing:_load_base_checkpoint",
    why="where the optimizer's state lies in a checkpoint depends on how it was saved",
    signatures={"0.16": "load_dir args rank0 sharded_state_dict checkpointing_context"},
    open=True,
)
REPORT_KEYS = Seam(
    target="megatron.core.dist_checkpointing.validation:maybe_report_missing_and_unexpected_keys",
    why="--dist-ckpt-strictness does not ask for what Odyssey never loads",
    signatures={"0.16": "missing_keys unexpected_keys raise_error"},
)
SCHEDULE_ASYNC_SAVE = Seam(
    target="megatron.training.async_utils:schedule_async_save",
    why="a rank writes its checkpoint in a thread, which does not outlive it",
    signatures={"0.16": "async_request"},
)
MAYBE_FINALIZE_ASYNC_SAVE = Seam(
    target="megatron.training.async_utils:maybe_finalize_async_save",
    why="a save that a failure has cut short is given up, and made again",
    signatures={"0.16": "blocking terminate"},
)
INIT_PERSISTENT_ASYNC_WORKER = Seam(
    target="megatron.training.initialize:init_persistent_async_worker",
    why="no process saves beside the ranks; core_v0.16.1 starts it before it validates any flag",
    signatures={"0.16": "", "0.17": "rank mp_mode"},
)
GET_CHECKPOINT_NAME = Seam(
    target="megatron.training.checkpointing:get_checkpoint_name",
    why="what an interrupted save has left is removed",
    signatures={"0.16": "checkpoints_path iteration return_base_dir"},
    open=True,
)
NON_PERSISTENT_CKPT_SUBDIR = Seam(
    target="megatron.training.checkpointing:_NON_PERSISTENT_CKPT_SUBDIR",
    why="what an interrupted save has left is removed",
    signatures={"0.16": ""},
)
CHECK_PARAM_HASHES = Seam(
    target="megatron.core.utils:check_param_hashes_across_dp_replicas",
    why="a layer's holders are those of the plan",
    signatures={"0.16": "model cross_check"},
)

TRANSFORMER_CONFIG = Seam(
    target="megatron.training.arguments:core_transformer_config_from_args",
    why="the model is what Megatron's flags say",
    signatures={"0.16": "args config_class"},
)
BUILD_DATA_ITERATORS = Seam(
    target="megatron.training.training:build_train_valid_test_data_iterators",
    why="silence while Megatron builds its data indices is no hang",
    signatures={"0.16": "build_train_valid_test_datasets_provider"},
)
PRINT_RANK_LAST = Seam(
    target="megatron.training.utils:print_rank_last",
    why="the last rank prints, and it may be another one after a failure",
    signatures={"0.16": "message"},
    open=True,
)

SET_TENSORBOARD_WRITER = Seam(
    target="megatron.training.global_vars:_set_tensorboard_writer",
    why="the curves go on when the rank that writes them has died",
    signatures={"0.16": "args"},
)
CALC_PARAMS_L2_NORM = Seam(
    target="megatron.training.utils:calc_params_l2_norm",
    why="the norm of the parameters counts each layer once, whoever holds it",
    signatures={"0.16": "model force_create_fp32_copy"},
)
APPEND_TO_PROGRESS_LOG = Seam(
    target="megatron.training.utils:append_to_progress_log",
    why="a process in the place of a dead rank starts no job",
    signatures={"0.16": "string barrier", "0.18": "save_dir string barrier"},
)
GET_START_TIME_FROM_PROGRESS_LOG = Seam(
    target="megatron.training.training:get_start_time_from_progress_log",
    why="throughput is logged per GPU, and their number changes",
    signatures={"0.16": ""},
)
COMPUTE_THROUGHPUTS = Seam(
    target="megatron.training.training:compute_throughputs_and_append_to_progress_log",
    why="the job's throughput counts from its start, and per GPU that it began with",
    signatures={"0.16": "iteration num_floating_point_operations_so_far"},
)

# -- replaced, in megatron.core --------------------------------------------------------------------------------------

GET_NUM_LAYERS_TO_BUILD = Seam(
    target="megatron.core.transformer.transformer_block:get_num_layers_to_build",
    why="model chunks of any length",
    signatures={"0.16": "config vp_stage pp_rank"},
)
GET_TRANSFORMER_LAYER_OFFSET = Seam(
    target="megatron.core.transformer.transformer_layer:get_transformer_layer_offset",
    why="model chunks that begin anywhere",
    signatures={"0.16": "config vp_stage pp_rank"},
)
PIPELINE_LAYER_LAYOUT = Seam(
    target="megatron.core.transformer.pipeline_parallel_layer_layout:PipelineParallelLayerLayout.__init__",
    why="weights are drawn in the order of the stages that it describes",
    signatures={"0.16": "self layout pipeline_model_parallel_size"},
)
LINEAR_BACKWARD = Seam(
    target="megatron.core.tensor_parallel.layers:LinearWithGradAccumulationAndAsyncCommunication.backward",
    why="weight gradients apart from input gradients fill the pipeline's bubbles",
    signatures={"0.16": "ctx grad_output"},
)
CHECKPOINT_BACKWARD = Seam(
    target="megatron.core.tensor_parallel.random:CheckpointFunction.backward",
    why="what is computed again has its weight gradients at once, so that it need not be kept",
    signatures={"0.16": "ctx"},
    open=True,
)
CALCULATE_LOGITS_MAX = Seam(
    target="megatron.core.tensor_parallel.cross_entropy:VocabParallelCrossEntropy.calculate_logits_max",
    why="--odyssey-float64 keeps the loss in float64",
    signatures={"0.16": "vocab_parallel_logits"},
    remedy="Leave out --odyssey-float64, or use a tested version of Megatron-LM.",
    only_if="--odyssey-float64 on",
)

SAVE_SHARDED = Seam(
    target="megatron.core.dist_checkpointing.serialization:save",
    why=_WHOLE,
    signatures={"0.16": "sharded_state_dict checkpoint_dir"},
    open=True,
)
WRITE_RESULTS_QUEUE = Seam(
    target="megatron.core.dist_checkpointing.strategies.filesystem_async:_get_write_results_queue",
    why=_WHOLE,
    signatures={"0.16": "", "0.17": None},
)
GET_WRITE_RESULTS_QUEUE = Seam(
    target="megatron.core.dist_checkpointing.strategies.filesystem_async:get_write_results_queue",
    why=_WHOLE,
    signatures={"0.16": None, "0.17": "mp_mode"},
)
WRITE_PRELOADED_DATA = Seam(
    target="megatron.core.dist_checkpointing.strategies.filesystem_async:"
    "FileSystemWriterAsync.write_preloaded_data_multiproc",
    why=_WHOLE,
    signatures={
        "0.16": "transform_list use_msc rank write_buckets global_results_queue",
        "0.17": None,
    },
)
OPEN_FILE = Seam(
    target="megatron.core.msc_utils:open_file",
    why=_WHOLE,
    signatures={"0.16": "*args **kwargs", "0.19": None},
)
MAYBE_MSC = Seam(
    target="megatron.core.msc_utils:MaybeMultiStorageClient.__getattr__",
    why=_WHOLE,
    signatures={"0.16": None, "0.19": "self name"},
)

# -- called, or set ---------------------------------------------------------------------------------------------------

FORWARD_STEP = Seam(
    target="megatron.core.pipeline_parallel.schedules:forward_step",
    why="runs the user's forward step on a model chunk",
    signatures={
        "0.16": "forward_step_func data_iterator model num_microbatches input_tensor forward_data_store config "
        "cp_group_size current_microbatch is_last_stage"
    },
    open=True,
)
BACKWARD_STEP = Seam(
    target="megatron.core.pipeline_parallel.schedules:backward_step",
    why="the backward of a model chunk",
    signatures={
        "0.16": "input_tensor output_tensor output_tensor_grad model_type config",
        "0.17": "input_tensor output_tensor output_tensor_grad config",
    },
)
DEALLOCATE_OUTPUT_TENSOR = Seam(
    target="megatron.core.pipeline_parallel.schedules:deallocate_output_tensor",
    why="frees an activation that has been sent",
    signatures={"0.16": "out deallocate_pipeline_outputs"},
)
INITIALIZE_MODEL_PARALLEL = Seam(
    target="megatron.core.parallel_state:initialize_model_parallel",
    why=_ALONE,
    signatures={"0.16": "tensor_model_parallel_size pipeline_model_parallel_size create_gloo_process_groups"},
    open=True,
)
DESTROY_GLOBAL_MEMORY_BUFFER = Seam(
    target="megatron.core.parallel_state:destroy_global_memory_buffer",
    why="what a failure cuts off may still write to the buffer that sequence parallelism gathers in",
    signatures={"0.16": ""},
)
SET_GLOBAL_MEMORY_BUFFER = Seam(
    target="megatron.core.parallel_state:_set_global_memory_buffer",
    why="makes another of these buffers",
    signatures={"0.16": ""},
)
SET_PIPELINE_RANK = Seam(
    target="megatron.core.parallel_state:set_pipeline_model_parallel_rank",
    why="user code asks which stage it runs in",
    signatures={"0.16": "rank"},
)
SET_PIPELINE_WORLD_SIZE = Seam(
    target="megatron.core.parallel_state:set_pipeline_model_parallel_world_size",
    why="user code asks how many stages there are",
    signatures={"0.16": "world_size"},
)
DATA_PARALLEL_GROUP = Seam(
    target="megatron.core.parallel_state:_DATA_PARALLEL_GROUP", why=_GLOBAL, signatures={"0.16": ""}
)
DATA_PARALLEL_GROUP_WITH_CP = Seam(
    target="megatron.core.parallel_state:_DATA_PARALLEL_GROUP_WITH_CP", why=_GLOBAL, signatures={"0.16": ""}
)
CONTEXT_PARALLEL_GROUP = Seam(
    target="megatron.core.parallel_state:_CONTEXT_PARALLEL_GROUP", why=_CONTEXT, signatures={"0.16": ""}
)
CONTEXT_PARALLEL_GLOBAL_RANKS = Seam(
    target="megatron.core.parallel_state:_CONTEXT_PARALLEL_GLOBAL_RANKS",
    why=_CONTEXT,
    signatures={"0.16": ""},
)
TENSOR_AND_CONTEXT_PARALLEL_GROUP = Seam(
    target="megatron.core.parallel_state:_TENSOR_AND_CONTEXT_PARALLEL_GROUP",
    why=_CONTEXT,
    signatures={"0.16": ""},
)
GET_BATCH_ON_THIS_CP_RANK = Seam(
    target="megatron.core.utils:get_batch_on_this_cp_rank",
    why="the example's ranks have each a part of the sequence",
    signatures={"0.16": "batch", "0.18": "batch is_hybrid_cp cp_group"},
    open=True,
    only_if="--context-parallel-size",
)
ROLL_TENSOR = Seam(
    target="megatron.core.transformer.multi_token_prediction:roll_tensor",
    why="multi-token prediction would send tokens between context-parallel ranks over the default group",
    signatures={"0.16": "tensor shifts dims cp_group packed_seq_params"},
    only_if="--mtp-num-layers with --context-parallel-size",
)
INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP = Seam(
    target="megatron.core.parallel_state:_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP",
    why=_GLOBAL,
    signatures={"0.16": ""},
)
PROCESS_GROUP_COLLECTION = Seam(
    target="megatron.core.process_groups_config:ProcessGroupCollection",
    why="gives models and optimizers the groups of this rank alone",
    signatures={"0.16": ""},
)
DISABLE_PARAMETER_TRANSPOSE_CACHE = Seam(
    target="megatron.core.transformer.transformer_config:TransformerConfig.disable_parameter_transpose_cache",
    why="with it Transformer Engine's layers always add to gradients, and never overwrite them",
    signatures={"0.16": ""},
)
IS_TE_MIN_VERSION = Seam(
    target="megatron.core.utils:is_te_min_version",
    why="an old Transformer Engine would lose gradients in a recovery",
    signatures={"0.16": "version check_equality"},
)
GET_MEGATRON_OPTIMIZER = Seam(
    target="megatron.core.optimizer:get_megatron_optimizer",
    why="each layer has an optimizer of Megatron's, which moves with it",
    signatures={"0.16": "config model_chunks config_overrides use_gloo_process_groups pg_collection"},
    open=True,
)
FILTER_PARAM_GROUPS = Seam(
    target="megatron.core.optimizer.optimizer:MegatronOptimizer._filter_and_reorder_param_groups",
    why="what a checkpoint says of groups of parameters is for those of the same kind",
    signatures={"0.16": "current_groups state_dict_groups"},
)
SHARDED_OPTIMIZER_TENSOR = Seam(
    target="megatron.core.dist_checkpointing.optimizer:make_sharded_optimizer_tensor",
    why="optimizer states lie in a checkpoint as their parameters do",
    signatures={"0.16": "model_param optim_param prefix"},
)
DISTRIBUTED_DATA_PARALLEL = Seam(
    target="megatron.core.distributed.distributed_data_parallel:DistributedDataParallel.__init__",
    why="provides the gradient buffers of a model chunk",
    signatures={"0.16": "config ddp_config module disable_bucketing pg_collection"},
    open=True,
)
CUDA_MANUAL_SEED = Seam(
    target="megatron.core.tensor_parallel.random:model_parallel_cuda_manual_seed",
    why="creates the generators that Odyssey seeds for each layer",
    signatures={"0.16": "seed tp_rank ep_rank etp_rank"},
    open=True,
)
RECONFIGURE_NUM_MICROBATCHES = Seam(
    target="megatron.core.num_microbatches_calculator:reconfigure_num_microbatches_calculator",
    why="the loop counts a whole global batch as this rank's",
    signatures={
        "0.16": "rank rampup_batch_size global_batch_size micro_batch_size data_parallel_size "
        "decrease_batch_size_if_needed"
    },
    open=True,
)
GET_OPTIMIZER_CONFIG = Seam(
    target="megatron.training.training:get_megatron_optimizer_config",
    why="the optimizers are set up as Megatron's flags say",
    signatures={"0.16": "args"},
)
GET_OPTIMIZER_PARAM_SCHEDULER = Seam(
    target="megatron.training.training:get_optimizer_param_scheduler",
    why="the learning rate follows Megatron's flags",
    signatures={"0.16": "optimizer"},
)
TENSORBOARD_WRITER = Seam(
    target="megatron.training.global_vars:_GLOBAL_TENSORBOARD_WRITER",
    why="the curves go on when the rank that writes them has died",
    signatures={"0.16": ""},
)
TRAIN_START_TIME = Seam(
    target="megatron.training.training:_TRAIN_START_TIME",
    why="--exit-duration-in-mins counts from the job's start, not from that of a process that joins",
    signatures={"0.16": ""},
)
SIGNAL_HANDLER = Seam(
    target="megatron.training.global_vars:_GLOBAL_SIGNAL_HANDLER",
    why="all ranks leave behind the same iteration",
    signatures={"0.16": ""},
)
PARSE_ARGS = Seam(
    target="megatron.training.arguments:parse_args",
    why="refuses flags before Megatron acts upon them",
    signatures={"0.16": "extra_args_provider ignore_unknown_args"},
)
LOAD_CHECKPOINT = Seam(
    target="megatron.training.training:load_checkpoint",
    why="a resumed job starts from Megatron's checkpoint",
    signatures={"0.16": "ddp_model optimizer opt_param_scheduler checkpointing_context"},
    open=True,
)
SET_RANDOM_SEED = Seam(
    target="megatron.training.initialize:_set_random_seed",
    why="initial weights are those that Megatron would draw",
    signatures={
        "0.16": "seed_ data_parallel_random_init te_rng_tracker inference_rng_tracker use_cudagraphable_rng"
    },
    open=True,
)
SET_JIT_FUSION_OPTIONS = Seam(
    target="megatron.training.initialize:set_jit_fusion_options",
    why="draws numbers between the seed and the initial weights",
    signatures={"0.16": ""},
    open=True,
)
INITIALIZE_MEGATRON = Seam(
    target="megatron.training.initialize:initialize_megatron",
    why="--odyssey-device cpu changes its default for allow_no_cuda",
    signatures={"0.16": "allow_no_cuda"},
    open=True,
    only_if="--odyssey-device cpu",
)
TORCH_NORM = Seam(
    target="megatron.core.transformer.torch_norm:WrappedTorchNorm.__new__",
    why="--odyssey-device cpu has no norm that says that it knows sequence parallelism",
    signatures={"0.16": "cls config hidden_size"},
    open=True,
    only_if="--odyssey-device cpu",
)
_OWN = tuple(value for value in list(globals().values()) if isinstance(value, Seam))
SEAMS: tuple[Seam, ...] = _OWN + HYBRID_SEAMS + CPU_SEAMS
