"""All arguments of Megatron-LM's that Odyssey knows, by their destination in the parsed arguments.

Each argument of each tested version is on exactly one of three lists (``tests/doctor/test_flags.py``). The lists of
those that work and those that are moot are here, grouped by reason; those that are refused are in
``upstream/refused.py``. An argument on no list is refused as unknown. Needs neither torch nor megatron.
"""

from __future__ import annotations

from collections.abc import Mapping

_WORKS = {
    "the optimizer and its schedule: tests/megatron_lm": """
    weight_decay adam_beta1 adam_beta2 adam_eps sgd_momentum lr_decay_style lr_wsd_decay_style
    lr_decay_iters lr_decay_samples lr_wsd_decay_iters lr_wsd_decay_samples lr_warmup_fraction
    lr_warmup_iters lr_warmup_samples lr_warmup_init start_weight_decay end_weight_decay
    weight_decay_incr_style lr min_lr decoupled_lr decoupled_min_lr
    use_mup mup_width_mult mup_base_hidden_size mup_embedding_mult mup_output_mult mup_base_head_dim
    mup_attn_scale_power
    """,
    "Muon: tests/megatron_lm/test_muon.py": """
    muon_momentum muon_split_qkv muon_use_nesterov muon_nesterov muon_scale_mode muon_fp32_matmul_prec
    muon_num_ns_steps muon_extra_scale_factor muon_coefficient_type
    """,
    "the types in which gradients and Adam's moments are kept: tests/megatron_lm/test_moments.py": """
    main_grads_dtype
    """,
    "of the training loop, and of this process alone": """
    profile profile_step_start profile_step_end profile_ranks pytorch_profiler_collect_shapes
    pytorch_profiler_collect_callstack pytorch_profiler_collect_chakra use_pytorch_profiler record_shapes
    nvtx_ranges record_memory_history memory_snapshot_path train_sync_interval manual_gc
    manual_gc_interval manual_gc_eval distributed_timeout_minutes local_rank distributed_backend
    """,
    "the tokenizer, in the data's own code": """
    vocab_size vocab_file vocab_extra_ids tokenizer_type tokenizer_model tokenizer_metadata
    tokenizer_special_tokens tiktoken_pattern tiktoken_num_special_tokens tiktoken_special_tokens
    tokenizer_sentencepiece_legacy tokenizer_hf_use_fast tokenizer_hf_include_special_tokens
    tokenizer_hf_no_use_fast tokenizer_hf_no_include_special_tokens
    tokenizer_sentencepiece_ignore_extra_whitespaces null_tokenizer_eod_id null_tokenizer_pad_id
    merge_file legacy_tokenizer metadata_path special_tokens chat_template trust_remote_code sft_tokenizer_prompt_format
    """,
    "what Megatron's loop logs of its own numbers": """
    wandb_project wandb_exp_name wandb_save_dir wandb_entity one_logger_project one_logger_run_name
    one_logger_async app_tag_run_name app_tag_run_version log_interval log_params_norm
    log_num_zeros_in_grad log_max_attention_logit log_progress log_throughput timing_log_option
    tensorboard_dir tensorboard_log_interval tensorboard_queue_size log_timers_to_tensorboard
    log_loss_scale_to_tensorboard log_validation_ppl_to_tensorboard log_memory_to_tensorboard
    log_memory_interval log_device_memory_used log_world_size_to_tensorboard logging_level
    enable_one_logger
    """,
    "NCCL's own records": """
    flight_recorder_dump_path flight_recorder_trace_buffer_size flight_recorder_dump_on_timeout
    flight_recorder_include_stack_trace flight_recorder_include_only_active
    flight_recorder_extra_dump_on_exec
    """,
    "the shape of the job: tests/megatron_lm, tests/e2e": """
    tensor_model_parallel_size context_parallel_size sequence_parallel
    cp_comm_type hierarchical_context_parallel_sizes
    untie_embeddings_and_output_weights heterogeneous_layers_config_path heterogeneous_layers_config_encoded_json
    decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers
    micro_batch_size global_batch_size rampup_batch_size
    step_batch_size_schedule phase_transition_iterations iterations_to_skip
    train_iters train_samples seq_length seed bf16 fp16 loss_scale initial_loss_scale min_loss_scale
    loss_scale_window hysteresis use_distributed_optimizer calculate_per_token_loss
    accumulate_allreduce_grads_in_fp32 grad_reduce_in_bf16 clip_grad
    check_weight_hash_across_dp_replicas_interval check_for_nan_in_loss_and_grad data_parallel_random_init
    deterministic_mode disable_bf16_reduced_precision_matmul exit_interval exit_duration_in_mins
    exit_signal_handler exit_signal exit_signal_handler_for_dataloader
    override_opt_param_scheduler use_checkpoint_opt_param_scheduler apply_wd_to_qk_layernorm
    no_weight_decay_cond_type account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split
    """,
    "inside of a layer, which moves as a whole": """
    transformer_impl num_layers encoder_num_layers hidden_size num_attention_heads attention_backend
    num_query_groups group_query_attention ffn_hidden_size kv_channels hidden_dropout
    attention_dropout apply_residual_connection_post_layernorm layernorm_epsilon
    layernorm_zero_centered_gamma add_bias_linear add_qkv_bias glu_linear_offset
    activation_func_clamp_value rotary_interleaved normalization qk_layernorm qk_l2_norm
    attention_output_gate multi_latent_attention q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim
    v_head_dim rotary_scaling_factor mscale mscale_all_dim init_method_std embedding_init_method_std
    init_method_xavier_uniform use_cpu_initialization apply_query_key_layer_scaling recompute_granularity
    recompute_method recompute_num_layers recompute_activations
    clone_scatter_output_in_embedding use_te_activation_func mlp_chunks_for_training window_size
    window_attn_skip_freq no_rope_freq max_position_embeddings encoder_seq_length
    use_rotary_position_embeddings rotary_base rotary_percent rotary_seq_len_interpolation_factor
    yarn_original_max_position_embeddings yarn_beta_fast yarn_beta_slow yarn_correction_range_round_to_int
    use_rope_scaling rope_scaling_factor rope_type add_position_embedding make_vocab_size_divisible_by
    padded_vocab_size openai_gelu squared_relu swiglu quick_geglu cross_entropy_loss_fusion
    cross_entropy_fusion_impl masked_softmax_fusion bias_gelu_fusion bias_swiglu_fusion
    bias_dropout_fusion apply_rope_fusion use_flash_attn flash_attention_version no_persist_layer_norm
    gradient_accumulation_fusion disable_jit_fuser attention_softmax_in_fp32 softmax_type fp16_lm_cross_entropy
    enable_experimental te_rng_tracker test_mode
    """,
    "fp8, by Transformer Engine's sources: tests/mcore/test_te_gpu.py": """
    fp8 fp8_wgrad first_last_layers_bf16 num_layers_at_start_in_bf16 num_layers_at_end_in_bf16
    moe_router_padding_for_quantization moe_router_padding_for_fp8
    """,
    "mixtures of experts: tests/megatron_lm/test_experts.py": """
    num_experts expert_model_parallel_size moe_layer_freq moe_ffn_hidden_size
    moe_shared_expert_intermediate_size moe_shared_expert_gate moe_shared_expert_overlap moe_router_topk
    moe_router_num_groups moe_router_group_topk moe_router_pre_softmax moe_router_topk_scaling_factor
    moe_router_score_function moe_router_dtype moe_router_enable_expert_bias
    moe_router_bias_update_rate moe_aux_loss_coeff moe_z_loss_coeff moe_input_jitter_eps
    moe_per_layer_logging moe_expert_capacity_factor moe_pad_expert_input_to_capacity
    moe_token_drop_policy moe_layer_recompute moe_apply_probs_on_input
    moe_permute_fusion moe_router_fusion use_fused_weighted_squared_relu moe_router_force_load_balancing
    """,
    "hybrid models: tests/megatron_lm/test_hybrid.py": """
    mamba_state_dim mamba_head_dim mamba_num_groups mamba_num_heads use_mamba_mem_eff_path
    mamba_training_ssm_states_dtype hybrid_attention_ratio hybrid_mlp_ratio
    """,
    "multi-token prediction: tests/megatron_lm/test_future.py": """
    mtp_num_layers mtp_loss_scaling_factor
    """,
    "the data set: samples are found by their global number": """
    data_path split train_data_path valid_data_path test_data_path data_args_path per_split_data_args_path
    per_dataset_sequences_path dataloader_fast_cache_load dataloader_defer_npy_index_mmap data_cache_path
    mmap_bin_files mock_data reset_position_ids reset_attention_mask eod_mask_loss
    create_attention_mask_in_dataloader num_dataset_builder_threads object_storage_cache_path
    data_sharding mid_level_dataset_surplus allow_ambiguous_pad_tokens enable_msc disable_msc_deprecated
    """,
    "filling in the middle, drawn by (seed, sample): tests/megatron_lm/test_middle.py": """
    fim_data fim_rate fim_spm_rate fim_split_sample fim_fragment_rate fim_no_prefix fim_prefix_token
    fim_middle_token fim_suffix_token fim_pad_token fim_eod_token
    """,
    "evaluations, as common work of all ranks: tests/megatron_lm": """
    eval_iters eval_interval start_eval_at_iter eval_global_batch_size full_validation multiple_validation_sets
    validation_set_names
    """,
    "checkpoints, as common work of all ranks: tests/megatron_lm": """
    save save_interval async_save load finetune pretrained_checkpoint ckpt_step exit_on_missing_checkpoint
    use_checkpoint_args use_tokenizer_model_from_checkpoint_args no_save_optim no_load_optim no_save_rng
    no_load_rng ckpt_fully_parallel_save ckpt_fully_parallel_load ckpt_fully_parallel_load_exchange_algo
    ckpt_assume_constant_structure ckpt_load_validate_sharding_integrity dist_ckpt_strictness
    dist_ckpt_workers non_persistent_save_interval non_persistent_global_ckpt_dir auto_detect_ckpt_format
    save_retain_interval verify_integrity
    """,
}
_MOOT = {
    "a signal ends all ranks behind the same step, with a checkpoint": """
    exit_signal_handler_for_training
    """,
    "read with --moe-token-dispatcher-type flex only": """
    moe_flex_dispatcher_backend moe_deepep_num_sms moe_hybridep_num_sms
    moe_permute_fusion_into_hybridep moe_hybridep_num_blocks_permute moe_hybridep_num_blocks_unpermute
    moe_hybridep_num_sms_preprocessing moe_hybridep_pad_uneven_dispatch_inputs
    moe_flex_dispatcher_num_sms moe_ncclep_static_shape moe_ncclep_zero_copy
    """,
    "read with --moe-use-upcycling only": """
    moe_upcycling_granularity
    """,
    "read with --moe-paged-stash only": """
    moe_paged_stash_page_size moe_paged_stash_buffer_size_factor_cuda
    moe_paged_stash_buffer_size_factor_cpu
    """,
    "read with --moe-routing-trace-path only": """
    moe_routing_trace_max_training_iters moe_routing_trace_capture_logits
    moe_routing_trace_capture_hidden_states moe_routing_trace_dump_weights
    """,
    "read with --moe-router-load-balancing-type quantile_balancing only": """
    moe_router_quantile_balancing_ema
    """,
    "read with --tp-comm-overlap only": """
    tp_comm_bulk_wgrad tp_comm_bulk_dgrad tp_comm_overlap_ag tp_comm_overlap_rs tp_comm_overlap_rs_dgrad
    tp_comm_split_ag tp_comm_split_rs tp_comm_bootstrap_backend tp_comm_overlap_cfg
    """,
    "read with --qk-clip only": """
    qk_clip_alpha qk_clip_threshold
    """,
    "read with --experimental-attention-variant only": """
    dsa_indexer_n_heads dsa_indexer_head_dim dsa_indexer_topk dsa_indexer_loss_coeff
    dsa_indexer_use_sparse_loss dsa_indexer_topk_freq dsa_indexer_skip_topk_offset dsa_kernel_backend
    dsa_indexer_rope_interleaved dsa_indexer_rotate_activation dsa_indexer_scoring_relu
    dsa_indexer_k_norm_epsilon dsa_indexer_k_norm_fp32
    """,
    "read by gated delta nets only": """
    linear_conv_kernel_dim linear_key_head_dim linear_value_head_dim linear_num_key_heads
    linear_num_value_heads
    """,
    "read by hybrid models in inference only": """
    mamba_inference_conv_states_dtype mamba_inference_ssm_states_dtype
    """,
    "read with delayed scaling of fp8, or --fp4-format, only": """
    fp8_margin fp8_interval fp8_amax_history_len fp8_amax_compute_algo fp4_recipe fp4_param
    fp4_quantizer_factory fp4_param_gather
    """,
    "read with weights kept in fp8 only": """
    reuse_grad_buf_for_mxfp8_param_ag keep_fp8_transpose_cache stream_ckpt_dequant
    """,
    "read with CUDA graphs only": """
    cuda_graph_warmup_steps cuda_graph_scope cuda_graph_scope_deprecated cuda_graph_modules
    """,
    "read by inference only": """
    flash_decode inference_fuse_tp_communication mlp_chunks_for_prefill inference_rng_tracker
    cache_mla_latents inference_batch_times_seqlen_threshold max_tokens_to_oom use_legacy_static_engine
    inference_max_batch_size inference_max_seq_length inference_dynamic_batching
    inference_dynamic_batching_buffer_size_gb inference_dynamic_batching_paused_buffer_size_gb
    inference_dynamic_batching_block_size inference_dynamic_batching_max_requests
    inference_dynamic_batching_max_tokens inference_dynamic_batching_num_cuda_graphs
    inference_dynamic_batching_track_paused_request_events decode_only_cuda_graphs
    inference_dynamic_batching_unified_memory_level nccl_all_reduce_for_prefill disable_chunked_prefill
    inference_dynamic_batching_cuda_graph_max_tokens
    inference_dynamic_batching_cuda_graph_mixed_prefill_count inference_logging_step_interval
    inference_wandb_logging inference_coordinator_port inference_disable_triton_nvls_kernels
    inference_grouped_gemm_backend inference_max_requests inference_dynamic_batching_mamba_memory_ratio
    inference_dynamic_batching_track_generated_token_events enable_chunked_prefill num_speculative_tokens
    inference_dynamic_batching_enable_prefix_caching
    inference_dynamic_batching_prefix_caching_eviction_policy
    inference_dynamic_batching_prefix_caching_coordinator_policy
    inference_dynamic_batching_prefix_caching_routing_alpha
    inference_dynamic_batching_prefix_caching_mamba_gb inference_text_gen_server_logging
    inference_use_synchronous_zmq_collectives inference_cuda_graph_scope inference_cuda_graph_all_prefills
    inference_dynamic_batching_sampling_backend inference_disable_ep_consensus
    inference_cuda_graph_max_tokens inference_dynamic_batching_cuda_graph_sizing_distribution
    offset_sampling_seed_by_dp_rank inference_dynamic_batching_async_sched_mode
    inference_dynamic_batching_logprobs_mode inference_shards
    moe_pad_experts_for_cuda_graph_inference inference_moe_disable_fused_quant_kernels
    inference_moe_token_dispatcher_type
    """,
    "read by models other than GPT only": """
    bert_binary_head ict_head_size biencoder_projection_dim biencoder_shared_query_context_model ict_load
    bert_load retriever_report_topk_accuracies retriever_score_scaling indexer_batch_size
    indexer_log_interval vision_pretraining_type vision_backbone_type swin_backbone_type
    dino_local_img_size dino_local_crops_number dino_head_hidden_size dino_bottleneck_size
    dino_freeze_last_layer dino_norm_last_layer dino_warmup_teacher_temp dino_teacher_temp
    dino_warmup_teacher_temp_epochs bert_embedder_type decoder_num_layers decoder_seq_length
    relative_attention_num_buckets relative_attention_max_distance onnx_safe sample_rate mask_prob
    short_seq_prob titles_data_path query_in_block_prob use_one_sent_docs evidence_data_path
    block_data_path embedding_path num_classes img_h img_w num_channels patch_dim classes_fraction
    data_per_class_fraction head_lr_mult mask_type mask_factor iter_per_epoch
    output_bert_embeddings vision_pretraining
    """,
    "read with optimizers that are refused": """
    lion_beta1 lion_beta2
    """,
    "read with --perform-rl-step only": """
    rl_prompts_per_eval grpo_prompts_per_step grpo_group_size grpo_iterations grpo_clamp_eps_lower
    grpo_clamp_eps_upper grpo_kl_beta grpo_entropy_term_weight grpo_filter_groups_with_same_reward
    langrl_inference_server_type langrl_inference_server_conversation_template langrl_external_server
    langrl_env_config rl_default_temperature rl_default_top_p rl_default_top_k
    rl_offload_optimizer_during_inference rl_offload_kv_cache_during_training
    rl_remove_kv_cache_during_training rl_reset_cuda_graphs rl_partial_rollouts
    rl_inference_logprobs_is_correction rl_importance_sampling_truncation_coef rl_use_sequence_packing
    rl_sequence_packing_max_sequences_per_bin rl_sequence_packing_algo rl_training_cuda_graphs
    rl_inference_tensor_model_parallel_size rl_inference_pipeline_model_parallel_size
    rl_inference_expert_model_parallel_size rl_inference_expert_tensor_model_parallel_size
    rl_inference_model_unified_memory_level rl_offload_inference_model_weights_when_idle refit_method
    rl_verify_model_weights_swap rl_parallel_generation_tasks rl_skip_bos_token
    rl_num_parallel_generations rl_num_parallel_generation_batches rl_generation_batch_size
    rl_kv_cache_management_mode rl_persist_cuda_graphs rl_inference_parsers rl_generation_lag
    rl_submission_granularity rl_consumption_granularity rl_profile rl_profile_dir
    """,
    "read with --non-persistent-ckpt-type local only": """
    non_persistent_local_ckpt_dir non_persistent_local_ckpt_algo replication replication_jump
    replication_factor
    """,
    "read with --use-megatron-fsdp or --use-torch-fsdp2 only": """
    strict_fsdp_dtensor_load fsdp_manual_registration data_parallel_sharding_strategy
    outer_dp_sharding_strategy gradient_reduce_div_fusion fsdp_double_buffer
    suggested_communication_unit_size enable_full_sharding_in_hsdp torch_fsdp2_reshard_after_forward
    megatron_fsdp_main_params_dtype megatron_fsdp_main_grads_dtype megatron_fsdp_grad_comm_dtype
    megatron_fsdp_enable_fine_grained_param_gather megatron_fsdp_max_pool_double_buffer
    fsdp_db_use_persist_buf_on_alloc_fail
    """,
    "read with --log-straggler only": """
    straggler_ctrlr_port straggler_minmax_count disable_straggler_on_startup
    """,
    "read with --inprocess-restart only": """
    inprocess_max_iterations inprocess_monitor_thread_interval inprocess_monitor_process_interval
    inprocess_progress_watchdog_interval inprocess_heartbeat_interval inprocess_soft_timeout
    inprocess_hard_timeout inprocess_heartbeat_timeout inprocess_barrier_timeout
    inprocess_completion_timeout inprocess_last_call_wait inprocess_termination_grace_time
    inprocess_granularity inprocess_active_world_size inprocess_empty_cuda_cache
    """,
    "read with --enable-ft-package only": """
    calc_ft_timeouts ft_num_warmup_iters
    """,
    "read with --fault-injector-ranks or --fault-injector-num-ranks only": """
    fault_injector_fault_types fault_injector_fault_probabilities fault_injector_fault_delay
    fault_injector_delay_start_iteration fault_injector_mtti_seconds fault_injector_offset_seconds
    fault_injector_seed
    """,
    "read with --logits-save-dir or --logits-load-dir only": """
    logits_save_top_k logits_save_top_p logits_save_top_p_min_k logits_save_dtype
    logits_load_decode_threads logits_load_prefetch_factor logits_load_msc_prefetch_depth
    logits_load_kd_loss_alpha logits_load_ignore_errors
    """,
    "Odyssey's own schedule and messages take its place": """
    use_ring_exchange_p2p overlap_p2p_comm overlap_p2p_comm_warmup_flush
    pipeline_model_parallel_comm_backend scatter_gather_tensors_in_pipeline
    """,
    "Odyssey's own schedule fills the bubbles": """
    num_layers_per_virtual_pipeline_stage num_virtual_stages_per_pipeline_rank
    overlap_moe_expert_parallel_comm ep_overlap_early_attn_memory_release
    overlap_dispatch_backward_with_experts_wgrad
    high_priority_a2a_comm_stream
    """,
    "with Muon each holder of a layer keeps all of its optimizer state": """
    use_layer_wise_param_layout
    """,
    "Odyssey's own schedule runs weight gradients apart": """
    delay_wgrad_compute defer_embedding_wgrad_compute
    """,
    "its buffers would be of the ranks that the job started with": """
    tp_comm_overlap
    """,
    "flex has buffers of the ranks that the job started with: alltoall sends the same tokens to the same experts": """
    moe_token_dispatcher_type moe_enable_deepep
    """,
    "weights that move are kept in 16 bits, and each product has them in fp8, as without it": """
    fp8_param_gather
    """,
    "Transformer Engine's modules are used one by one, so that their weight gradients run apart": """
    use_transformer_engine_op_fuser
    """,
    "a graph would be of the layers that it was captured with": """
    cuda_graph_impl enable_cuda_graph external_cuda_graph optimizer_cuda_graph
    """,
    "Odyssey repeats a step by itself, after a failure only": """
    rerun_mode
    """,
    "it puts errors into what Megatron would repeat; --odyssey-inject kills ranks": """
    error_injection_rate
    """,
    "Odyssey shares out optimizer states itself": """
    num_distributed_optimizer_instances overlap_param_gather_with_optimizer_step
    """,
    "reductions are instructions of Odyssey's schedule": """
    overlap_grad_reduce align_grad_reduce overlap_param_gather align_param_gather ddp_num_buckets
    ddp_bucket_size ddp_pad_buckets_for_high_nccl_busbw ddp_reduce_scatter_with_fp32_accumulation
    ddp_average_in_collective create_all_gather_group nccl_ub disable_symmetric_registration
    """,
    "Odyssey makes the groups, anew in each generation": """
    enable_gloo_process_groups use_gloo_process_groups high_priority_stream_groups use_sharp
    sharp_enabled_group nccl_communicator_config_path
    """,
    "checkpoints are saved as torch_dist, which every layout loads": """
    ckpt_format
    """,
    "layers, not shards of buffers, are saved, which any layout can load": """
    dist_ckpt_optim_fully_reshardable distrib_optim_fully_reshardable_mem_efficient
    """,
    "Megatron's own step, which Odyssey's replaces, reads it": """
    empty_unused_memory_level
    """,
    "its timers are of Megatron's own step, which Odyssey's replaces; odyssey report shows what a step consists of": """
    timing_log_level barrier_with_L1_time
    """,
    "a microbatch is read where it is computed, as that begins, by the thread that trains": """
    num_workers
    """,
    "read by older versions of Megatron-LM only": """
    async_tensor_model_parallel_allreduce batch_size warmup model_parallel_size checkpoint_activations
    deprecated_use_mcore_models use_dist_ckpt_deprecated dist_ckpt_format_deprecated
    ckpt_fully_parallel_save_deprecated ckpt_convert_update_legacy_dist_opt_format
    moe_extended_tp
    """,
    "read with --hybrid-context-parallel only": """
    max_seqlen_per_dp_cp_rank
    """,
    "read with virtual pipeline stages only": """
    microbatch_group_size_per_vp_stage
    """,
    "read with --defer-embedding-wgrad-compute only": """
    wgrad_deferral_limit
    """,
    "read with --use-kitchen-attention only": """
    kitchen_attention_backend
    """,
    "read with activations or optimizer states on the host only": """
    offload_modules min_offloaded_tensor_size cpu_offloading_retain_pinned_cpu_buffers
    fine_grained_offloading_max_inflight_offloads delay_offload_until_cuda_graph
    delta_offload_bytes_across_pp_ranks activation_offload_fraction optimizer_offload_fraction
    use_torch_optimizer_for_cpu_offload overlap_cpu_optimizer_d2h_h2d pin_cpu_grads pin_cpu_params
    """,
    "a save beside training is written by threads of the ranks": """
    use_persistent_ckpt_worker async_strategy async_ckpt_cpu_priority async_ckpt_io_priority
    async_ckpt_use_cpu_shm
    """,
    "read with --ckpt-convert-format only": """
    ckpt_convert_save
    """,
    "read with Model Optimizer only": """
    export_default_te_spec export_force_local_attention export_kd_teacher_ckpt_format export_kd_teacher_model_config
    export_kv_cache_quant export_model_type export_moe_apply_probs_on_input export_qk_l2_norm export_real_quant_cfg
    finetune_data_split finetune_hf_dataset freeze_base_for_mtp qad_train_target
    """,
    "read with --error-injection-rate only": """
    error_injection_type
    """,
    "read with --adlr-autoresume only": """
    adlr_autoresume_interval
    """,
    "read by multimodal models only": """
    mrope_section
    """,
    "the plan places the workers": """
    use_tp_pp_dp_mapping
    """,
}


def _by_destination(groups: Mapping[str, str]) -> dict[str, str]:
    return {name: reason for reason, names in groups.items() for name in names.split()}


WORKS = _by_destination(_WORKS)
"""Destination -> why it works: it is under test, or cannot matter to who holds what."""
MOOT = _by_destination(_MOOT)
"""Destination -> why it changes nothing: Odyssey does its work, or what would read it is off, or refused."""
MUON = ("muon", "dist_muon")
"""Muon's values of --optimizer: with its state whole on each rank, or spread over them."""
AS_ODYSSEY_DOES = {
    "ckpt_format": ("torch_dist",),
    "cuda_graph_impl": ("none",),
    "rerun_mode": ("disabled", "validate_results"),
    "num_distributed_optimizer_instances": (1,),
    "moe_token_dispatcher_type": ("allgather", "alltoall"),
    "num_workers": (0,),
    "timing_log_level": (0, 2),
}
"""Moot destination -> the values that ask for what Odyssey does anyway."""
