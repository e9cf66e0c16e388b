"""Faults that similar libraries had, and the tests here that would find each: file::test.

Sources (issues, CVEs): vLLM 1486, 50427, 53982, 45704; flash-attention 1745; onnxruntime 32391; llama.cpp 7313;
transformers 45510, 48700; LMCache 3388, 5151; CVE-2025-25183, -32434, -46570, -62164; mlx-lm 1109, 1486; and others."""

ROWS = {
    "offsets beyond 2^31 elements": (
        "bad_inputs/test_sizes.py::test_pages_beyond_4_gib",
        "bad_inputs/test_sizes.py::test_strides_beyond_2_31_elements",
        "bad_inputs/test_sizes.py::test_entries_hold_any_offset",
    ),
    "a table, an array read past its end": (
        "bad_inputs/test_edges.py::test_nothing_is_read_past_its_end", "test_attend.py::test_page_borders",
    ),
    "a page number that is none": (
        "test_attend.py::test_bad_tables_are_named", "test_evict.py::test_compact_checks_its_moves",
    ),
    "NaN in slots that nobody wrote": (
        "bad_inputs/test_edges.py::test_new_memory_is_nan_in_every_test", "test_attend.py::test_error_bounds",
        "test_attend.py::test_direct_append",
    ),
    "groups of zeros, denormals, one Inf": (
        "test_cast_policy.py::test_this_level", "test_codec.py::test_scales_round_to_even_and_never_leave_fp16",
        "test_codec.py::test_nan_and_inf_are_rejected",
    ),
    "scales lost or frozen": (
        "test_mutators.py::test_scales_are_not_frozen_by_the_first_call",
        "test_files.py::test_goes_on_as_if_nothing_had_been",
    ),
    "rounding that differs from level to level": (
        "test_codec.py::test_e4m3_decodes_all_codes_and_rounds_at_every_boundary",
        "test_codec.py::test_other_small_floats_at_every_boundary", "test_codec.py::test_levels_give_the_same_bytes",
    ),
    "offload: read before it is written, written while in use": (
        "test_tiers.py::test_random_delays_and_failures", "test_tiers.py::test_a_thousand_runs_and_no_wrong_byte",
    ),
    "a load that failed taken for one that did not": (
        "test_tiers.py::test_damaged_tier_is_an_error", "test_faults_world.py::test_tier_files_missing_or_damaged",
    ),
    "exact multiples of a page": (
        "test_attend.py::test_page_borders", "bad_inputs/test_edges.py::test_nothing_is_read_past_its_end",
    ),
    "a shared page written, the wrong page counted": (
        "test_cache_life.py::test_deepcopy_reuses_a_prefix", "test_prefix.py::test_pages_are_the_same_memory",
    ),
    "found and gone before it is taken": ("test_threads.py::test_eight_threads",),
    "digests that collide": ("test_prefix.py::test_collisions_are_misses",),
    "a key that forgets the model, the salt, the format": ("test_prefix_keys.py::test_other_keys_miss",),
    "who may know of a shared prefix": ("test_prefix_keys.py::test_other_keys_miss",),
    "hostile files": ("test_files.py::test_hostile_files", "test_files.py::test_damage_is_found"),
    "mutators that forget the quantized part": (
        "test_mutators.py::test_as_dynamic_cache", "test_matrix.py::test_sample",
    ),
    "eviction that breaks positions, masks or rings": (
        "test_policies.py::test_a_budget_of_all_tokens_is_no_policy", "test_policies.py::test_positions_in_the_cache",
        "test_sliding_window.py::test_a_ring_attends_to_what_its_window_sees",
    ),
    "rows of a padded batch": (
        "test_product.py::test_rows_of_a_padded_batch_equal_the_rows_alone", "test_attend.py::test_padding",
        "test_product.py::test_rows_that_finish_leave_the_batch_longest_first",
    ),
    "drafts that are taken back": ("test_mutators.py::test_a_rejected_draft_leaves_no_trace",),
    "graphs that replay old pointers": (
        "test_cuda_graph.py::test_replay", "test_cuda_graph.py::test_an_eviction_needs_a_new_capture",
        "test_cuda_graph.py::test_captured_memory_does_not_move",
    ),
    "odd head dims, strides and offsets": (
        "bad_inputs/test_edges.py::test_odd_dims_and_strides", "test_attend.py::test_other_head_dims",
    ),
    "an option that fails late": ("test_matrix.py::test_refused_before_any_work",),
    "leaks on the way of errors": (
        "bad_inputs/test_sizes.py::test_errors_leak_nothing", "test_faults.py::test_nothing_leaks",
    ),
    "other dtypes, devices, autograd": ("test_bad_inputs.py::test_bad_keys_and_values",),
    "fork after use": ("test_faults_world.py::test_fork_after_use",),
    "Ctrl-C": ("test_faults_world.py::test_ctrl_c_while_it_generates",),
    "a full pool": ("test_faults_world.py::test_the_pool_fills_up_in_the_middle_of_a_batch",),
    "two interpreters": ("test_faults_world.py::test_two_interpreters",),
    "one thread or many": ("test_attend.py::test_results_do_not_depend_on_threads",),
}  # fmt: skip
