"""Which tests belong to which file, fastest first, and which mutants are equivalent."""

from __future__ import annotations

Stage = tuple[str, ...]
"""Arguments of one run of pytest."""

ENGINE, STATE = "tests/test_engine.py", "tests/laws/test_state.py"
DDP: Stage = ("tests/test_ddp.py", "-k", "infinite or awkward or unused or comes_back or join or refused")
HOOKS: Stage = ("tests/test_hooks.py", "-k", "not affine")
ONE_RANK: Stage = (
    "tests/test_saved.py",
    "tests/test_attach.py",
    "-k",
    "not attaching_again and not interrupt and not test_a_rank",
)
ATTACHED: Stage = ("tests/test_attach.py",)
REPORT: Stage = ("tests/test_run_report.py", "-k", "not slow_link")
WITHOUT_RANKS = "lies or waits or window or gradients_norm or norms or verdict or without_times or text or mapping"
ARITHMETIC: Stage = ("tests/test_run_report.py", "-k", WITHOUT_RANKS)
ROUTES: Stage = ("tests/test_routes.py",)
COST: Stage = ("tests/laws/test_cost.py",)
CHECKPOINT: Stage = ("tests/test_checkpoint.py",)
GOING_ON: Stage = ("tests/test_going_on.py",)

EXCEPTIONS = "tests/test_exceptions.py"

SYNC = "tests/test_sync.py"
ALONE = "not ranks and not processors and not mesh and not momentum and not nodes and not differ and not scaler"
"""Tests of `SYNC` in one process."""
WINDOWS: tuple[Stage, ...] = ((SYNC, "-k", ALONE), (SYNC, "-k", "not processors"))
OPTIMIZERS: tuple[Stage, ...] = (("tests/test_optimizers.py", "-k", "not processors"),)
ELASTIC: Stage = ("tests/test_elastic.py",)
SCRIPT_SAVES: Stage = ("tests/test_script_saves.py",)
ELASTIC_STOPS: Stage = ("tests/test_elastic_stops.py", "-m", "not slow", "-k", "not processes and not finished_run")
UNCHANGED: Stage = ("tests/test_run.py", "-k", "unchanged_script")
MOMENTS: Stage = ("tests/test_moments.py",)
UNFREEZING: Stage = ("tests/test_unfreezing.py",)
GOSSIP: Stage = ("tests/test_gossip.py",)
LAYERS: Stage = ("tests/test_layers.py",)
FSDP2: Stage = ("tests/test_fsdp2.py",)
RUN_FSDP2: Stage = ("tests/test_run_fsdp2.py",)
SHARDS: Stage = ("tests/test_sync_shards.py",)
ACCUMULATION = "tests/test_accumulation.py"
OVERLAP: Stage = ("tests/test_overlap.py",)
PARTS: Stage = ("tests/test_parts.py",)
FLOWER: Stage = ("tests/test_flower.py",)

FILES: dict[str, tuple[Stage, ...]] = {
    "drivers/any_flag.py": (("src/gradwire/drivers/any_flag.py", ENGINE, "tests/test_handle.py"),),
    "drivers/axes.py": (("tests/test_topology_links.py",),),
    "drivers/checked.py": (("src/gradwire/drivers/checked.py", "tests/test_faults.py", "-k", "checksum"),),
    "drivers/contention.py": (("src/gradwire/drivers/contention.py", "tests/test_contention.py"),),
    "drivers/cost.py": (("src/gradwire/drivers/cost.py", "tests/test_coalesce.py", ENGINE, "tests/test_plan.py"), COST),
    "drivers/engine.py": ((ENGINE, "tests/test_handle.py"), ONE_RANK, REPORT, HOOKS, DDP),
    "drivers/faulty.py": (("src/gradwire/drivers/faulty.py", "tests/test_faults.py", "-k", "not real"),),
    "drivers/groups.py": (("src/gradwire/drivers/groups.py", "tests/test_groups.py"), ATTACHED),
    "drivers/host_memory.py": (("src/gradwire/drivers/host_memory.py", "tests/test_host_memory.py"),),
    "drivers/interpreter.py": (
        ("tests/test_interpreter.py", "tests/test_coalesce.py", ENGINE, "tests/test_handle.py"),
        COST,
        ROUTES,
    ),
    "drivers/level_bytes.py": (("src/gradwire/drivers/level_bytes.py", "tests/laws/test_node_levels.py"),),
    "drivers/link_profiler.py": (("tests/test_link_profile.py", "tests/test_topology_links.py"),),
    "drivers/lockstep.py": (
        ("src/gradwire/drivers/lockstep.py", ENGINE, "tests/test_interpreter.py"),
        (STATE,),
        ("tests/laws/test_rules.py",),
    ),
    "drivers/measure.py": (
        ("tests/test_measure.py",),
        (*ROUTES, "-k", "measures"),
    ),
    "drivers/nodes.py": (("tests/test_node_auto.py",),),
    "drivers/plan.py": (("src/gradwire/drivers/plan.py", "tests/test_plan.py", ENGINE),),
    "drivers/probing.py": (("src/gradwire/drivers/probing.py", "tests/test_probing.py"),),
    "drivers/process_group.py": (
        ("tests/test_interpreter.py", "tests/test_exchanges.py"),
        ("tests/test_handle.py",),
        ROUTES,
        HOOKS,
        DDP,
    ),
    "drivers/slot.py": ((ENGINE, "tests/test_handle.py"), ONE_RANK),
    "drivers/stack.py": (("src/gradwire/drivers/stack.py", "tests/test_layers.py"),),
    "drivers/timing.py": (("src/gradwire/drivers/timing.py", "tests/laws/test_routes.py"),),
    "drivers/topology.py": (("tests/test_topology_links.py", "tests/test_topology.py"),),
    "drivers/traced.py": (("src/gradwire/drivers/traced.py", "tests/test_interpreter.py"),),
    "drivers/clocks.py": (("tests/test_doctor_ranks.py", "-k", "clock"), ("tests/test_profile.py", "-k", "skew")),
    "drivers/virtual.py": (("src/gradwire/drivers/virtual.py", ENGINE), ("tests/laws/test_rules.py",)),
    "drivers/dry_run.py": (
        ("src/gradwire/drivers/dry_run.py", "tests/test_dry_run.py"),
        ("tests/test_attach.py", "-k", "compiles"),
    ),
    "drivers/window.py": (("src/gradwire/drivers/window.py", *ARITHMETIC), REPORT),
    "session/checkpoint.py": (("src/gradwire/session/checkpoint.py", "tests/test_handle.py"), CHECKPOINT, GOING_ON),
    "session/offers.py": (("src/gradwire/session/offers.py",), CHECKPOINT),
    "session/saved_runs.py": (CHECKPOINT,),
    "adapters/attach.py": ((*FSDP2, "-k", "gathers_no"), ATTACHED),
    "adapters/accumulation/window.py": (
        ("src/gradwire/adapters/accumulation/window.py", ACCUMULATION, "-k", "window_is or without_its or interrupt"),
        (ACCUMULATION,),
    ),
    "adapters/accumulation/gradient_sync.py": ((ACCUMULATION,),),
    "adapters/accumulation/rank_sums.py": ((ACCUMULATION,),),
    "adapters/attached.py": ((ACCUMULATION, "-k", "big_batch_of_all"),),
    "session/repeated.py": (
        ("src/gradwire/session/repeated.py", ACCUMULATION, "-k", "anew or skips"),
        (ACCUMULATION, "-k", "told"),
    ),
    "adapters/wrap.py": (("src/gradwire/adapters/wrap.py",), ("tests/test_spec.py", "-k", "wrap")),
    "adapters/fsdp2/attach.py": ((*FSDP2, "-k", "told_why or twice"), (*FSDP2, "-k", "copies"), FSDP2),
    "adapters/fsdp2/comm.py": (FSDP2,),
    "adapters/fsdp2/form.py": ((*FSDP2, "-k", "half or alike"), ("tests/test_weights.py", "-k", "nobody"), FSDP2),
    "adapters/fsdp2/gather.py": ((*FSDP2, "-k", "spoil"), FSDP2),
    "adapters/fsdp2/groups.py": ((*FSDP2, "-k", "told_why or twice"), FSDP2),
    "adapters/fsdp2/node_axes.py": (("tests/test_fsdp2.py", "-k", "nodes"),),
    "adapters/fsdp2/port.py": ((EXCEPTIONS, "-k", "fsdp2"), FSDP2),
    "adapters/fsdp2/roots.py": ((*RUN_FSDP2, "-k", "place or root"), RUN_FSDP2),
    "adapters/fsdp2/rows.py": (FSDP2,),
    "adapters/fsdp2/stateful.py": ((*FSDP2, "-k", "distributed"),),
    "drivers/parts.py": (PARTS, FSDP2),
    "session/form.py": (("tests/test_session.py",), (*FSDP2, "-k", "apart")),
    "adapters/fsdp2/prefetch.py": ((*OVERLAP, "-k", "sharded"),),
    "adapters/overlapped_optimizer.py": ((*OVERLAP, "-k", "stepped or refused"),),
    "adapters/unwrapped.py": (OVERLAP,),
    "session/overlap_settings.py": (
        ("src/gradwire/session/overlap_settings.py", *OVERLAP, "-k", "settings"),
        CHECKPOINT,
    ),
    "adapters/buckets.py": (("src/gradwire/adapters/buckets.py", "tests/test_buckets.py"),),
    "adapters/communication.py": (("tests/test_handle.py",), (EXCEPTIONS, "-k", "Attached"), ONE_RANK, ATTACHED, DDP),
    "session/lane.py": (
        ("tests/test_failures.py", "tests/test_handle.py", "tests/test_session.py"),
        ONE_RANK,
        ATTACHED,
        DDP,
    ),
    "session/automatic.py": (("src/gradwire/session/automatic.py", "tests/test_automatic.py"),),
    "session/direct_lane.py": (("tests/test_lane.py",), ELASTIC),
    "session/drift.py": (("src/gradwire/session/drift.py", "tests/test_drift.py"),),
    "session/ending.py": (("tests/test_session.py",), ATTACHED),
    "session/figures.py": (("src/gradwire/session/figures.py", *ARITHMETIC), REPORT),
    "session/fingerprints.py": (
        ("src/gradwire/session/fingerprints.py", "tests/test_drift.py"),
        (SYNC, "-k", "differ"),
    ),
    "session/agreement.py": (("src/gradwire/session/agreement.py", "tests/test_session.py"),),
    "session/making.py": (("tests/test_session.py",), ("tests/test_weights.py", "-k", "nobody"), ATTACHED),
    "session/names.py": (("src/gradwire/session/names.py", "tests/test_session.py"), ONE_RANK, UNFREEZING),
    "session/feed.py": (("tests/test_session.py", "tests/test_handle.py"), ONE_RANK, REPORT, DDP),
    "session/states.py": (("tests/test_session.py", "tests/test_handle.py"), CHECKPOINT),
    "session/step.py": (
        ("tests/test_session.py", "tests/test_handle.py"),
        (EXCEPTIONS, "-k", "Steps"),
        ONE_RANK,
        ATTACHED,
    ),
    "session/session.py": (
        ("src/gradwire/session/session.py", "tests/test_session.py", "tests/test_handle.py"),
        ONE_RANK,
        ATTACHED,
        REPORT,
        DDP,
    ),
    "session/together.py": (CHECKPOINT,),
    "session/non_finite.py": (("src/gradwire/session/non_finite.py", "tests/test_non_finite.py"),),
    "session/records.py": (("tests/test_hangs.py", "-k", "record"),),
    "session/memory.py": (("src/gradwire/session/memory.py",), REPORT),
    "session/own_file.py": (("tests/test_handle.py",),),
    "session/pace.py": (("tests/test_run_report.py",), ("tests/test_sync.py", "tests/test_gossip.py")),
    "session/watching.py": (("src/gradwire/session/watching.py", "tests/test_drift.py"),),
    "sync/alike.py": ((SYNC, "-k", "differ"),),
    "sync/all_ranks.py": (*WINDOWS, SHARDS),
    "sync/averaging.py": (*WINDOWS, MOMENTS, UNFREEZING),
    "sync/averaging_options.py": WINDOWS,
    "sync/averaging_saved.py": (*WINDOWS, MOMENTS, GOING_ON),
    "sync/averaging_state.py": (*WINDOWS, MOMENTS),
    "sync/buffers.py": WINDOWS,
    "sync/copies.py": ((*SHARDS, "-k", "not_served"), (EXCEPTIONS, "-k", "Local or Levels"), SHARDS),
    "sync/fragment.py": (("src/gradwire/sync/fragment.py",), *WINDOWS, MOMENTS),
    "sync/global_copy.py": (*WINDOWS, ELASTIC),
    "sync/elastic/attempt.py": (ELASTIC, ("tests/test_exit.py",)),
    "sync/elastic/change.py": (ELASTIC,),
    "sync/elastic/elastic.py": (ELASTIC, UNFREEZING),
    "sync/elastic/handover.py": (ELASTIC,),
    "sync/elastic/transfer.py": (ELASTIC,),
    "sync/elastic/link.py": (ELASTIC,),
    "sync/elastic/messages.py": (ELASTIC,),
    "sync/elastic/owed.py": (ELASTIC,),
    "sync/elastic/protocol.py": (ELASTIC_STOPS, ELASTIC),
    "sync/elastic/heartbeat.py": (ELASTIC_STOPS, ELASTIC),
    "sync/elastic/rounds.py": (ELASTIC_STOPS, ELASTIC),
    "sync/elastic/shared.py": (ELASTIC,),
    "sync/elastic/store.py": (ELASTIC,),
    "sync/elastic/worker.py": (ELASTIC_STOPS, ELASTIC),
    "sync/gossip/checks.py": (GOSSIP,),
    "sync/gossip/choco.py": (GOSSIP,),
    "sync/gossip/d_psgd.py": (GOSSIP,),
    "sync/gossip/gossip.py": (GOSSIP, GOING_ON, UNFREEZING),
    "sync/gossip/graphs.py": (GOSSIP,),
    "sync/gossip/method.py": (GOSSIP,),
    "sync/gossip/naming.py": (GOSSIP,),
    "sync/gossip/sgp.py": (GOSSIP,),
    "sync/gossip/whole.py": (GOSSIP,),
    "sync/hierarchical.py": (*WINDOWS, GOING_ON, (EXCEPTIONS, "-k", "Levels")),
    "sync/swap.py": (("src/gradwire/sync/swap.py",),),
    "sync/local_sgd.py": (*WINDOWS, GOING_ON, UNFREEZING),
    "sync/methods.py": (("tests/test_sync_spec.py",), UNFREEZING),
    "sync/moments.py": (("src/gradwire/sync/moments.py",), *WINDOWS, MOMENTS),
    "sync/outer.py": (("src/gradwire/sync/outer.py",), *WINDOWS),
    "sync/post_local.py": (("tests/test_post_local.py",), UNFREEZING),
    "sync/scaling.py": ((SYNC, "-k", "scaler"), *OPTIMIZERS),
    "sync/schedules.py": (("src/gradwire/sync/schedules.py",), *WINDOWS),
    "sync/shards.py": ((*SHARDS, "-k", "mid_window or evaluated"), SHARDS),
    "sync/spec.py": (("src/gradwire/sync/spec.py", "tests/test_sync_spec.py"),),
    "sync/wrapper.py": (*WINDOWS, ("tests/test_post_local.py",), UNFREEZING),
    "sync/optimizers/arithmetic.py": (("src/gradwire/sync/optimizers/arithmetic.py",), *OPTIMIZERS),
    "sync/optimizers/base.py": (*OPTIMIZERS, UNFREEZING),
    "sync/optimizers/demo.py": OPTIMIZERS,
    "sync/optimizers/dion.py": OPTIMIZERS,
    "sync/optimizers/one_bit_adam.py": OPTIMIZERS,
    "sync/optimizers/orthonormal.py": (("src/gradwire/sync/optimizers/orthonormal.py",), *OPTIMIZERS),
    "sync/optimizers/zero_one_adam.py": (("src/gradwire/sync/optimizers/zero_one_adam.py",), *OPTIMIZERS),
    "adapters/flower/__init__.py": (("tests/test_flower.py", "-k", "without_flower or plain"),),
    "adapters/flower/client.py": (("src/gradwire/adapters/flower/client.py",), FLOWER),
    "adapters/flower/content.py": (FLOWER,),
    "adapters/flower/memory.py": (FLOWER,),
    "adapters/flower/nodes.py": (FLOWER,),
    "adapters/flower/strategy.py": (FLOWER,),
    "adapters/ddp.py": (
        ("src/gradwire/adapters/ddp.py", "tests/test_handle.py"),
        ONE_RANK,
        ATTACHED,
        REPORT,
        HOOKS,
        DDP,
    ),
    "session/failures.py": (
        ("tests/test_failures.py",),
        ATTACHED,
        ("tests/test_ddp.py", "-k", "exception"),
        (EXCEPTIONS, "-k", "fsdp2"),
    ),
    "adapters/hooks.py": (("tests/test_hook_sessions.py", "tests/test_handle.py"), HOOKS),
    "session/meeting.py": (("tests/test_meeting.py",), CHECKPOINT),
    "adapters/__init__.py": (("src/gradwire/adapters/__init__.py",),),
    "adapters/accelerate.py": (
        ("tests/test_framework_parts.py", "-k", "accelerator"),
        ("tests/test_frameworks.py", "-k", "accelerate"),
    ),
    "adapters/drift.py": (("tests/test_drift.py",),),
    "adapters/uncompiled.py": (("tests/test_run.py", "-k", "compiled"), ("tests/test_drift.py",)),
    "adapters/frameworks.py": (("src/gradwire/adapters/frameworks.py", "tests/test_framework_parts.py"),),
    "adapters/lightning.py": (("tests/test_frameworks.py", "-k", "lightning"),),
    "adapters/script_loads.py": (
        ("src/gradwire/adapters/script_loads.py", "tests/test_script_follow.py"),
        SCRIPT_SAVES,
    ),
    "adapters/script_moves.py": (("tests/test_script_follow.py",), SCRIPT_SAVES),
    "adapters/script_places.py": (
        ("src/gradwire/adapters/script_places.py", "tests/test_script_follow.py"),
        (*RUN_FSDP2, "-k", "way"),
    ),
    "adapters/script_saves.py": (("tests/test_script_follow.py",), SCRIPT_SAVES, RUN_FSDP2, UNCHANGED),
    "adapters/script_profile.py": (("tests/test_profile.py", "-k", "script"),),
    "adapters/told.py": (("tests/test_script_follow.py",), ("tests/test_run.py", "-k", "processes")),
    "adapters/watched.py": (("tests/test_run.py", "-k", "processes"), UNCHANGED),
    "adapters/transformers.py": (("tests/test_frameworks.py", "-k", "transformers"),),
    "adapters/unchanged.py": (
        ("tests/test_run.py", "-k", "TestModels"),
        (*RUN_FSDP2, "-k", "not resume and not ranks"),
        ("tests/test_run.py", "-k", "unchanged_script"),
    ),
    "adapters/models.py": (("src/gradwire/adapters/models.py", "tests/test_handle.py"), ONE_RANK, DDP),
    "adapters/post_local_hook.py": (("src/gradwire/adapters/post_local_hook.py", "tests/test_post_local.py"),),
    "adapters/power_sgd_state.py": (
        ("src/gradwire/adapters/power_sgd_state.py", "tests/test_handle.py", "tests/test_saved.py"),
        HOOKS,
    ),
    "adapters/power_sgd_factors.py": (("tests/test_handle.py", "tests/test_saved.py"), HOOKS),
    "adapters/power_sgd_layout.py": (("tests/test_handle.py", "tests/test_saved.py"), HOOKS),
    "adapters/power_sgd_port.py": (("tests/test_handle.py", "tests/test_saved.py"), HOOKS),
    "adapters/power_sgd_memory.py": (("tests/test_saved.py",), HOOKS),
    "session/estimate.py": (("src/gradwire/session/estimate.py", *ARITHMETIC), ("tests/test_probing.py",)),
    "session/step_times.py": (("src/gradwire/session/step_times.py", *ARITHMETIC), ("tests/test_probing.py",)),
    "session/report.py": (("src/gradwire/session/report.py", *ARITHMETIC), REPORT),
    "core/saved.py": (("tests/test_saved.py",), (STATE,), CHECKPOINT),
    "compare/figures.py": (
        ("src/gradwire/compare/figures.py", "tests/test_results.py", "tests/test_verdict.py", "tests/test_storage.py"),
    ),
}

LEFT_OUT = {("session/lane.py", "SideStream"), ("drivers/any_flag.py", "_sent_to_host")}
"""What runs on a GPU only: `tests/test_cuda.py` tests it where there is one."""

EQUIVALENT: dict[tuple[str, str], str] = {
    ("drivers/process_group.py", "LARGE_ROWS_BYTES = 1 << 19 -> LARGE_ROWS_BYTES = 2 << 19"): (
        "from which size on rows are posted one by one: both ways bring the same bytes, and the size was measured"
    ),
    (
        "adapters/models.py",
        'if getattr(ddp, "_use_python_reducer", False): -> if getattr(ddp, "_use_python_reducer", True):',
    ): "every DDP has the attribute; what is taken where it is missing matters to no version that is served",
    (
        "adapters/communication.py",
        "for bucket, future in zip(step.buckets[:count], step.futures[:count], strict=True): -> "
        "for bucket, future in zip(step.buckets[:count], step.futures[:count], strict=False):",
    ): "both are `count` long: a bucket is noted before its future, and `count` is how many futures there are",
}
"""Mutants that compute the same, by file and change, with the reason."""
