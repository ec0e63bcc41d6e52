"""What strandline must say of each job in jobs/: the table behind test_field_reports.py.

Names begin with the report's number in the list of field reports (L: leaks, F: false alarms); N and F20 upwards are
further cases of the same kinds; J: cases in which judgement is harder than counting. A job marks its own truth: `# ALLOCATES` the lines of which one must be the finding's,
`# KEEPS` those of which one must be the kept line (no mark: none may be named).

Not rebuilt, because one process without a GPU cannot show them:
  L29 CUDA IPC: the sender's table of sent blocks; two processes and a GPU.
  L31 torch.compile's cache entries: compiles for longer than a job may take.
  L33, L35 CUDA graphs' private pools and cuBLAS workspaces; L37 frees delayed by another stream; F07 cuDNN autotuning:
      they need a GPU (tests/gpu covers the allocator's side).
  L39 cuDNN's plan cache: host memory of a library, no tensor.
  L41 communicators kept in c10d's map: memory of NCCL, outside torch.
  L53 the reporter's reading is unconfirmed, and no small program shows it.
  L59 the profiler keeps tensors only while it records CUDA or very long; the remark for it has a unit test.
  L63 a CUDA context in each worker: other processes; test_workers.py covers what the parent can see.
"""

from typing import Dict, List, NamedTuple


class Leak(NamedTuple):
    kind: str
    held: str  # regular expression for held_by.path
    says: List[str] = []  # regular expressions for the text report
    allocated: bool = True  # the job marks the lines that allocate


class Clean(NamedTuple):
    says: List[str] = []
    never_called: bool = True  # nothing may be said on stderr while it runs
    verdict: str = "clean"


PER_STEP, PER_EPOCH, SPORADIC, ONCE = "per-iteration", "per-epoch", "sporadic", "one-off"

JOBS: Dict[str, object] = {
    "L01_running_loss_validation": Leak(
        PER_STEP, r"local of validate\(\): total > \.grad_fn > AddBackward0", [r"carries the autograd graph"]
    ),
    "L01_running_loss_training": Clean(
        [
            r"running_loss carries an autograd graph that grows by \d+ nodes per step",
            r"host memory grows and not the GPU's",
        ],
        never_called=False,
        verdict="undecided",
    ),
    "L03_history_of_losses": Leak(
        PER_STEP, r"stats\.values\[\d+\] > \.grad_fn.*list Stats\.values", [r"value\.item\(\)"]
    ),
    "L05_outputs_of_an_epoch": Leak(PER_STEP, r"local of run_epoch\(\): outputs\[\d+\]\['x'\]"),
    "L05_outputs_cleared": Clean([r"emptied at each turn of the outer loop"]),
    "L07_predictions_regrow": Leak(
        PER_STEP, r"local of evaluate\(\): preds", [r"one tensor regrows", r"1 live block"]
    ),
    "L09_metric_with_list_states": Leak(
        PER_STEP, r"metric\.(preds|target)\[\d+\].*list AveragePrecision\.(preds|target)"
    ),
    "L11_hook_appends": Leak(PER_STEP, r"conv\.acts\[\d+\].*module Classifier\.backbone\.layer3\.2"),
    "L11_hook_leaves_output": Leak(ONCE, r"net\[1\]\.output", [r"retained once", r"= None"]),
    "L13_bound_method_cycle": Clean(
        [
            r"reference cycles: \d+ blocks were freed by the garbage collector alone",
            r"gc\.collect\(\) frees it at once",
        ],
        never_called=False,
    ),
    "L15_bounded_lru_cache": Clean([r"bounded cache: \d+ of at most 60 entries"]),
    "L17_failed_backward": Leak(
        ONCE, r"last_error\.__traceback__ > frame of large_step\(\)", [r"with_traceback\(None\)"]
    ),
    "L19_output_on_ctx": Leak(
        PER_STEP, r"reference cycle .*grad_fn\.y", [r"save_for_backward", r"gc\.collect\(\)"]
    ),
    "L21_create_graph": Leak(
        PER_STEP,
        r"a gradient that carries its graph: Parameter\.grad",
        [r"create_graph=True", r"C\+\+ that gc cannot see"],
    ),
    "L23_state_fed_back": Leak(
        PER_STEP, r"local of generate\(\): state > \.grad_fn", [r"graph of \d+ nodes", r"\.detach\(\)"]
    ),
    "L25_moving_average_of_loss": Leak(
        PER_STEP, r"sampler\.ema > \.grad_fn", [r"graph of \d+ nodes", r"\.detach\(\)"]
    ),
    "L27_replay_with_graphs": Leak(
        PER_STEP,
        r"global replay\[\d+\].*at most 100,000 \(\d.* when full\)",
        [r"detach", r"at most 100000 \(.* when full\)"],
    ),
    "L43_shared_registry": Leak(PER_EPOCH, r"GradientState\._shared\['dl'\]\[\d+\]", allocated=False),
    "L45_objects_on_parameters": Leak(
        PER_STEP, r"reference cycle .*(_hp|lowp)", [r"gc is disabled", r"gc\.collect\(\): it would free"]
    ),
    "L47_collector_off": Leak(
        PER_STEP,
        r"reference cycle MicroBatch\.batch",
        [r"gc is disabled", r"gc\.collect\(\): it would free these"],
    ),
    "L49_checkpoint_closure": Leak(
        PER_STEP, r"reference cycle .*<closure seen>\['x'\]", [r"gc\.collect\(\): it would free"]
    ),
    "L51_views_of_features": Leak(
        PER_STEP, r"feats\[\d+\]", [r"views pin their base: 3\.0 KiB of 591\.0 KiB", r"\.clone\(\)"]
    ),
    "L55_results_with_past": Leak(PER_STEP, r"session\.results\[\d+\]\.past_key_values"),
    "L55_tree_of_indices": Leak(PER_STEP, r"tree\.root\.children\[\d+\].*Node\.children"),
    "L57_futures_with_errors": Leak(
        PER_STEP,
        r"server\.pending\[\d+\]\._(exception|result)",
        [r"each future in self\.pending keeps its result"],
    ),
    "L61_trials": Leak(PER_EPOCH, r"study\['trials'\]\[\d+\]\['fn'\]\.<closure model>", allocated=False),
    "L65_ctx_holds_module": Leak(
        PER_STEP, r"reference cycle .*fcn.*xsol", [r"gc\.collect\(\): it would free"]
    ),
    "N01_old_optimizers": Leak(
        PER_EPOCH, r"schedule\.cycles\[\d+\]\.state", [r"second optimizer state"], allocated=False
    ),
    "N02_suspended_generators": Leak(
        PER_STEP,
        r"streams\[\d+\] > generator stream\(\) > local buffer",
        [r"suspended generator", r"close\(\)"],
    ),
    "N03_finalizers": Leak(PER_STEP, r"weakref\.finalize", [r"id or a weak reference"]),
    "N04_threads_waiting": Leak(
        PER_STEP, r"one of \d+ threads that run in upload\(\): local x", [r"let them end"]
    ),
    "N05_dataset_caches": Leak(
        PER_STEP, r"loader\.dataset\.cache", [r"the dataset keeps what it has loaded"]
    ),
    "N06_last_traceback": Leak(
        ONCE, r"sys\.last_traceback > frame of failing_step\(\) > local x", [r"del sys\.last_traceback"]
    ),
    "N07_notebook_history": Leak(PER_STEP, r"global Out\[\d+\]", [r"%reset -f out"]),
    "N09_average_handed_out": Leak(PER_STEP, r"global meter\.value > \.grad_fn", [r"^(?!.*NOTE)"]),
    "N10_cache_by_epoch": Leak(PER_STEP, r"features\['0:0'\]", [r"features gets a new entry each time"]),
    "N08_sporadic_views": Leak(
        SPORADIC, r"miner\.hard\[\d+\]", [r"views pin their base: 128 B of 32\.0 KiB"]
    ),
    "J01_stage_that_leaked": Leak(
        PER_STEP, r"local of pretrain\(\): kept\[\d+\]", [r"until that stage of the program ended"]
    ),
    "J02_average_begun_late": Clean([r"made late and in use since: average is read at"]),
    "J03_validation_set_late": Clean([r"made late and in use since: held_out is read at"]),
    "J04_mask_for_longest": Clean(never_called=False),
    "J05_groups_added": Leak(
        PER_EPOCH, r"optimizer\.(state|param_groups)\[", [r"add_param_group is called again and again"]
    ),
    "J06_last_checkpoints": Clean([r"bounded by its own code"]),
    "J07_baseline_evaluation": Clean([r"then was freed by step"], never_called=False),
    "J08_features_gathered": Clean([r"to be read afterwards: it does not grow"], never_called=False),
    "J09_condition_of_the_loss": Leak(PER_STEP, r"local of train\(\): keep\[\d+\]", [r"keep"]),
    "F01_sizes_heavy_tailed": Clean([r"largest input so far"]),
    "F03_record_after_record": Clean([r"rose \d+ times, ever more rarely", r"largest input so far"]),
    "F05_longer_than_ever": Clean([r"largest input so far"]),
    "F09_adam_and_late_layers": Clean([r"optimizer state exp_avg", r"^(?!.*follows the input)"]),
    "F11_one_large_request": Clean([r"largest input so far"]),
    "F13_buckets_rebuilt": Clean(),
    "F15_detached_losses": Clean([r"emptied at each turn"]),
    "F17_gradient_histograms": Clean(),
    "F20_first_validation": Clean([r"validation needs more at once than a training step"]),
    "F21_cache_of_a_conversation": Clean([r"again and again"]),
    "F22_best_checkpoint": Clean(),
    "F23_replay_full": Clean([r"bounded container: deque of \d+, at most 70"]),
    "F24_metric_reset": Clean([r"emptied at each turn of the outer loop \(F24_metric_reset\.py:30\)"]),
    "F25_too_short_to_say": Clean([r"UNDECIDED", r"40 steps decide whether it goes on"], verdict="undecided"),
    "F26_rollouts_get_longer": Clean([r"^(?!.*NOTE)"]),
    "F27_cache_of_samples": Clean([r"filled once for each sample: its key index"]),
}
