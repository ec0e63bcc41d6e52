/* strandline: a CUDA caching allocator with built-in leak accounting. The C ABI.
 *
 * This file is the source of truth: the Rust side's declarations are generated from it.
 *
 * Conventions
 *   - Sizes, addresses and rates are in bytes. A step is one iteration of a training loop.
 *   - Every function may be called from any thread, with or without Python's GIL, unless it says otherwise.
 *   - Functions that return int return 0 (or a count) on success and a negative STRANDLINE_E* code on
 *     failure; none aborts, throws, or changes errno.
 *   - Functions that fill a text buffer return the length of the whole text without its terminating 0
 *     and write at most `size` bytes, terminating 0 included; call with size 0 to ask for the length.
 */
#ifndef STRANDLINE_H
#define STRANDLINE_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define STRANDLINE_ABI_VERSION 1

/* Failure codes. */
#define STRANDLINE_EINVAL (-1)   /* an argument is not what the function takes */
#define STRANDLINE_EINACTIVE (-2) /* strandline is not active in this process (strandline_start) */
#define STRANDLINE_ENOENT (-3)   /* no such thing: a finding, a device, a block */
#define STRANDLINE_EIO (-4)      /* a file could not be written; said on stderr once */
#define STRANDLINE_ENOMEM (-5)   /* no memory left, after everything was tried */
#define STRANDLINE_EINTERNAL (-6) /* a fault of strandline's own, caught; said on stderr once */

/* Where events come from. */
#define STRANDLINE_MODE_OFF 0
#define STRANDLINE_MODE_HEAP 1     /* strandline's heap is the GPU's allocator */
#define STRANDLINE_MODE_OBSERVER 2 /* torch's native allocator is watched */
#define STRANDLINE_MODE_HOST 3     /* CPU tensors are served from strandline's heap over host memory */

/* What the program is doing. */
#define STRANDLINE_PHASE_OTHER 0
#define STRANDLINE_PHASE_FORWARD 1
#define STRANDLINE_PHASE_BACKWARD 2
#define STRANDLINE_PHASE_OPTIMIZER 3
#define STRANDLINE_PHASE_VALIDATION 4

/* STRANDLINE_ABI_VERSION of the library. */
uint32_t strandline_abi_version(void);

/* The library's version, "0.1.0"; static. */
const char *strandline_version(void);

/* Begins accounting in this process in one of STRANDLINE_MODE_*. `options` is a JSON object or NULL:
 * {"out": folder, "quiet": bool, "every": steps, "command": [argv…]}. A second call with the same mode
 * does nothing. Returns 0, or STRANDLINE_EINVAL. */
int strandline_start(int mode, const char *options);

/* The mode in force in this process (STRANDLINE_MODE_*): OFF before strandline_start and in forked children. */
int strandline_mode(void);

/* A step ended. Returns how many candidates wait for an explanation (strandline_candidates), usually 0. */
int strandline_step(void);

/* A new epoch began. */
int strandline_epoch(void);

/* The program enters a phase (STRANDLINE_PHASE_*). Returns the phase that was in force. */
int strandline_phase(int phase);

/* Sites whose blocks accumulate and which nobody has explained yet, as a JSON array:
 * [{"id": int, "class": "per-iteration"|…, "device": int, "live_bytes": int, "live_blocks": int,
 *   "asked": how often its growth was explained away before,
 *   "allocated_at": {"file","line","function"}, "stack": [frames, innermost first],
 *   "blocks": [{"address": int, "size": int, "step": int}, … at most 16: oldest, newest and between]}] */
size_t strandline_candidates(char *buffer, size_t size);

/* Answers a candidate. `answer` is a JSON object:
 * {"held_by": {"path": str, "kind": str}|null, "kept_at": {"file","line","code"}|null, "fix": str,
 *  "released_by": "nothing"|"gc"|"empty_cache"|"synchronize"|"unknown",
 *  "not_a_leak": str|null, "reason": its heading in docs/findings.md|null, "bounded": {"length": int, "capacity": int}|null, "group": str, "seconds": float}
 * "group" names the holder: candidates of one group are one finding. Returns 0, or STRANDLINE_ENOENT. */
int strandline_explain(uint64_t id, const char *answer);

/* Python's garbage collector begins (on = 1) or ends (0) its work: blocks that die meanwhile were kept by
 * reference cycles. Returns 0. */
int strandline_collecting(int on);

/* Something worth knowing that is no finding, for stderr and the report, as a JSON object:
 * {"kind": heading in docs/findings.md, "what": str, "because": str, "fix": str}. The same `what` is said once; at
 * most 32 are kept. Returns 0, or STRANDLINE_EINVAL. */
int strandline_remark(const char *remark);

/* Gives the host heap's cache back to the system (mode HOST; the GPU's goes with torch.cuda.empty_cache()). Returns 0. */
int strandline_trim(void);

/* Writes the report now into `folder` (NULL: the run's own folder). Returns 0 or STRANDLINE_EIO. */
int strandline_report(const char *folder);

/* The run is over: judges what still waits, writes the last report and says where it is. Once; later calls
 * do nothing. Returns 0 or STRANDLINE_EIO. */
int strandline_finish(void);

/* Statistics of a device as a JSON object with the keys of torch.cuda.memory_stats(); device -1 is the host. */
size_t strandline_stats(int device, char *buffer, size_t size);

/* The source text of a module of the embedded Python package ("" for the package itself), or NULL. */
const char *strandline_python_source(const char *module);

#ifdef __cplusplus
}
#endif
#endif /* STRANDLINE_H */
