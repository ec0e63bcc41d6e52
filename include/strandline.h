/* strandline: a CUDA caching allocator with built-in leak accounting. The C ABI, for C11 and C++11 and later.
 *
 * This file is the source of truth: the Rust side's declarations are generated from it. docs/c_api.md is the
 * guide; examples/c/ has programs that use it.
 *
 * In a process there is one strandline. It is there because the program was linked with it (-lstrandline),
 * because it was preloaded (`strandline run -- program`), or because it was opened with dlopen(RTLD_GLOBAL).
 *
 * Units. Sizes, addresses and rates are in bytes, times in seconds unless a name says otherwise. A step is one
 *   iteration of the program's loop (one batch, one request); an epoch is a pass over the data.
 * Threads. Every function may be called from any thread, with or without Python's GIL, unless it says
 *   otherwise. Allocating takes one lock per device, for well under a microsecond unless the driver is asked.
 * Errors. Functions that return int return 0 (or a count) on success and a negative STRANDLINE_E* code on
 *   failure; what was wrong is said by strandline_error(). None aborts, throws, or changes errno. Output
 *   arguments are written on success only.
 * Text. Functions that fill a text buffer return the length of the whole text without its terminating 0 and
 *   write at most `size` bytes, terminating 0 included; call with size 0 to ask for the length.
 * Ownership. Blocks belong to the caller until strandline_free. Strings that are returned are static. Arguments
 *   are read during the call and never kept.
 * fork. In a forked child strandline is inert: every function here returns STRANDLINE_EINACTIVE or has
 *   no effect. Blocks of host memory stay readable and writable there; a GPU cannot be used in a forked child.
 */
#ifndef STRANDLINE_H
#define STRANDLINE_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- versions ------------------------------------------------------------------------------------------ */

/* The version of this header. The ABI version rises when a function changes or goes; functions are added
 * without a change of it, so a program that needs a new one asks for STRANDLINE_VERSION. */
#define STRANDLINE_ABI_VERSION 1
#define STRANDLINE_VERSION_MAJOR 0
#define STRANDLINE_VERSION_MINOR 1
#define STRANDLINE_VERSION_PATCH 0
#define STRANDLINE_VERSION \
    (STRANDLINE_VERSION_MAJOR * 10000 + STRANDLINE_VERSION_MINOR * 100 + STRANDLINE_VERSION_PATCH)

/* STRANDLINE_ABI_VERSION of the library in the process. Compare it with the header's before anything else
 * where the two may be of different releases. */
uint32_t strandline_abi_version(void);

/* STRANDLINE_VERSION of the library in the process. */
uint32_t strandline_version_number(void);

/* The library's version, "0.1.0"; static. */
const char *strandline_version(void);

/* ---- codes --------------------------------------------------------------------------------------------- */

#define STRANDLINE_EINVAL (-1)    /* an argument is not what the function takes */
#define STRANDLINE_EINACTIVE (-2) /* strandline is not active in this process (strandline_start, _open) */
#define STRANDLINE_ENOENT (-3)    /* no such thing: a finding, a device, a block */
#define STRANDLINE_EIO (-4)       /* a file could not be written; said on stderr once */
#define STRANDLINE_ENOMEM (-5)    /* no memory left, after everything was tried */
#define STRANDLINE_EINTERNAL (-6) /* a fault of strandline's own, caught; said on stderr once */
#define STRANDLINE_EDRIVER (-7)   /* the device's driver failed, other than for lack of memory */

/* What the last failure of a function of this header was, on the calling thread: whole sentences, without a
 * line's end. Empty before the first. */
size_t strandline_error(char *buffer, size_t size);

/* ---- the run ------------------------------------------------------------------------------------------- */

/* Where events come from. */
#define STRANDLINE_MODE_OFF 0
#define STRANDLINE_MODE_HEAP 1     /* strandline's heap serves the GPUs */
#define STRANDLINE_MODE_OBSERVER 2 /* what another allocator (torch's, CUDA's) hands out is watched */
#define STRANDLINE_MODE_HOST 3     /* strandline's heap serves host memory */

/* What the program is doing. */
#define STRANDLINE_PHASE_OTHER 0
#define STRANDLINE_PHASE_FORWARD 1
#define STRANDLINE_PHASE_BACKWARD 2
#define STRANDLINE_PHASE_OPTIMIZER 3
#define STRANDLINE_PHASE_VALIDATION 4

/* Begins accounting in this process in one of STRANDLINE_MODE_*. `options` is a JSON object or NULL:
 * {"out": folder, "quiet": bool, "every": steps, "guard": bool, "command": [argv…]}. A second call with the same mode
 * does nothing. C programs call strandline_open instead. Returns 0, or STRANDLINE_EINVAL. */
int strandline_start(int mode, const char *options);

/* The mode in force in this process (STRANDLINE_MODE_*): OFF before strandline_start and in forked children. */
int strandline_mode(void);

/* A step ended. Returns how many candidates wait for an explanation (strandline_candidates), usually 0, or
 * STRANDLINE_EINACTIVE. A program that never calls it, nor tells of requests (below), has steps too: each round
 * of the period of its allocations is one, or each second while they have no period. */
int strandline_step(void);

/* A new epoch began. Returns 0 or STRANDLINE_EINACTIVE. */
int strandline_epoch(void);

/* The program enters a phase (STRANDLINE_PHASE_*). Returns the phase that was in force, STRANDLINE_EINVAL or
 * STRANDLINE_EINACTIVE. The phase is that of the process, not of the thread. */
int strandline_phase(int phase);

/* The number of the phase of this name, for strandline_phase: one of STRANDLINE_PHASE_* for their names, else one of
 * the program's own, which reports show by its name. A program may name 32; those beyond are
 * STRANDLINE_PHASE_OTHER. STRANDLINE_EINVAL for a name that is empty or not UTF-8, or STRANDLINE_EINACTIVE. */
int strandline_phase_of(const char *name);

/* A server's request begins and ends on the calling thread. The end of the outermost request of a thread is
 * a step: blocks that outlive many requests and accumulate are findings, in whatever order requests overlap.
 * From the first _begin on no step is guessed. _begin returns how many requests this thread is in (1: the
 * outermost); _end returns how many are left, or STRANDLINE_EINVAL without a _begin. */
int strandline_request_begin(void);
int strandline_request_end(void);

/* Writes the report now into `folder` (NULL: the run's own). Returns 0, STRANDLINE_EINVAL or STRANDLINE_EIO. */
int strandline_report(const char *folder);

/* The findings of this moment as a JSON array, as the report's "findings" (docs/reports.md). "[]" where there
 * are none, or strandline is not active. */
size_t strandline_findings(char *buffer, size_t size);

/* The run is over: judges what still waits, writes the last report and says where it is. Once; later calls
 * do nothing. After strandline_open it is called by itself when the process exits.
 * Returns 0 or STRANDLINE_EIO. */
int strandline_finish(void);

/* ---- the allocator ------------------------------------------------------------------------------------- */

/* A device is a CUDA ordinal (CUDA_VISIBLE_DEVICES applies), or the host: */
#define STRANDLINE_HOST (-1)

/* Opens a device and begins accounting: in mode HEAP for a GPU, HOST for the host. `options` as for
 * strandline_start; they are read by the first call only. A GPU's primary context is made if there is none
 * (some 100 ms, some 100 MiB of its memory). A process accounts host memory or GPUs, not both: the other one is
 * STRANDLINE_EINVAL. An open device stays open.
 * Returns 0, STRANDLINE_EINVAL, STRANDLINE_ENOENT (no such GPU, or no driver) or STRANDLINE_EDRIVER. */
int strandline_open(int device, const char *options);

/* Puts the address of at least `size` bytes into `*block`, aligned to 512 bytes on a GPU and 64 on the host;
 * size 0 gives a block of the smallest size. The block is for work on `stream` (a cudaStream_t or CUstream of
 * the device's primary context; NULL: the default stream), which must live as long as the process: its name is
 * used when idle memory moves to another stream. Content is undefined. The device must be open.
 * Returns 0, STRANDLINE_ENOMEM, STRANDLINE_EINVAL, STRANDLINE_EINACTIVE, STRANDLINE_ENOENT or
 * STRANDLINE_EDRIVER. */
int strandline_malloc(int device, size_t size, void *stream, void **block);

/* Takes a block back; NULL is ignored. It may be handed out again at once to its own stream, whose later
 * work runs after the work that still uses it, and elsewhere when that work is done: no need to wait before.
 * Work on other streams must be named by strandline_record_stream. Returns 0, STRANDLINE_EDRIVER, or
 * STRANDLINE_ENOENT: no block of strandline's that is handed out begins there (never was, or freed before);
 * nothing has changed then. */
int strandline_free(void *block);

/* The block is also used by work sent to `stream` up to the moment of its strandline_free. Returns 0 or
 * STRANDLINE_ENOENT. */
int strandline_record_stream(void *block, void *stream);

/* The size of a block as it was requested (`*requested`) and as it is (`*rounded`); either may be NULL.
 * Returns 0 or STRANDLINE_ENOENT. */
int strandline_block_size(const void *block, size_t *requested, size_t *rounded);

/* Gives all idle cached memory of a device back to its driver, after waiting for the work that may still
 * use it. Rarely of use: memory is given back before an allocation fails. Returns 0 or STRANDLINE_ENOENT. */
int strandline_trim(int device);

/* Limits what the heap may hold of a device, in bytes; 0: no limit but the device's own. What is held stays
 * held. Returns 0 or STRANDLINE_ENOENT. */
int strandline_set_limit(int device, size_t bytes);

/* Free and total physical memory of a device as its driver sees it, other processes included; either may be
 * NULL. Returns 0, STRANDLINE_ENOENT or STRANDLINE_EDRIVER. */
int strandline_memory_info(int device, size_t *free_bytes, size_t *total_bytes);

/* Counters of an open device. Later versions add members at the end. */
typedef struct strandline_counters {
    uint64_t allocated_bytes;      /* in blocks that are handed out, after rounding */
    uint64_t allocated_peak_bytes; /* the most of these so far */
    uint64_t requested_bytes;      /* in blocks that are handed out, as requested */
    uint64_t reserved_bytes;       /* of physical memory held, handed out or idle */
    uint64_t reserved_peak_bytes;  /* the most of these so far */
    uint64_t live_blocks;          /* blocks that are handed out */
    uint64_t mallocs;              /* blocks ever handed out */
    uint64_t frees;                /* blocks ever taken back */
    uint64_t out_of_memory;        /* requests that failed */
} strandline_counters;

/* Fills `*counters`, of which `size` bytes (sizeof *counters) are there. Returns 0, STRANDLINE_EINVAL or
 * STRANDLINE_ENOENT. */
int strandline_get_counters(int device, strandline_counters *counters, size_t size);

/* Sets the peaks of an open device to the present values. Returns 0 or STRANDLINE_ENOENT. */
int strandline_reset_peaks(int device);

/* Statistics of a device as a JSON object with the keys of torch.cuda.memory_stats(); "{}" for a device that is
 * not open. */
size_t strandline_stats(int device, char *buffer, size_t size);

/* The shape of functions that CuPy's CFunctionAllocator takes; `stream` is its `param`: the stream that the
 * blocks are for. As strandline_malloc and strandline_free, but NULL on failure; the device must be open. Their
 * caller must check for NULL (CuPy does not): examples/frameworks/cupy_allocator.py. */
void *strandline_cupy_malloc(void *stream, size_t size, int device);
void strandline_cupy_free(void *stream, void *block, int device);

/* ---- explanations -------------------------------------------------------------------------------------- */

/* Sites whose blocks accumulate and which nobody has explained yet, as a JSON array:
 * [{"id": int, "class": "per-iteration"|…, "device": int, "live_bytes": int, "live_blocks": int,
 *   "asked": how often its growth was explained away before,
 *   "allocated_at": {"file","line","function"}, "stack": [frames, innermost first],
 *   "blocks": [{"address": int, "size": int, "step": int}, … at most 16: oldest, newest and between]}]
 * A program that never asks for them loses nothing: findings are called without an explanation. */
size_t strandline_candidates(char *buffer, size_t size);

/* Answers a candidate. `answer` is a JSON object:
 * {"held_by": {"path": str, "kind": str}|null, "kept_at": {"file","line","code"}|null, "fix": str,
 *  "released_by": "nothing"|"gc"|"empty_cache"|"synchronize"|"unknown",
 *  "not_a_leak": str|null, "reason": its heading in docs/findings.md|null, "bounded": {"length": int, "capacity": int}|null, "group": str, "seconds": float,
 *  "keyless": whether nobody looks for single entries of what keeps the blocks, so that it is no cache}
 * "group" names the holder: candidates of one group are one finding. Returns 0, or STRANDLINE_ENOENT. */
int strandline_explain(uint64_t id, const char *answer);

/* Python's garbage collector begins (on = 1) or ends (0) its work: blocks that die meanwhile were kept by
 * reference cycles. Returns 0. */
int strandline_collecting(int on);

/* Something worth knowing that is no finding, for stderr and the report, as a JSON object:
 * {"kind": heading in docs/findings.md, "what": str, "because": str, "fix": str}. The same `what` is said once; at
 * most 32 are kept. Returns 0, or STRANDLINE_EINVAL. */
int strandline_remark(const char *remark);

/* Says a line on the stderr that the process was started with, behind "strandline: ", also while something else
 * is in stderr's place (pytest's capture). Returns 0, or STRANDLINE_EINVAL. */
int strandline_say(const char *line);

/* A PyCFunctionWithKeywords whose self is a tuple (before, original, after): calls before(*arguments), the
 * original, and after(token, result, failed). With self NULL: NULL where this Python does not have what that
 * needs, else not NULL. */
void *strandline_around(void *self, void *arguments, void *keywords);

/* The source text of a module of the embedded Python package ("" for the package itself), or NULL. */
const char *strandline_python_source(const char *module);

/* ---- torch's plug-in ----------------------------------------------------------------------------------- */

/* The functions that torch.cuda.memory.CUDAPluggableAllocator takes by name:
 *   CUDAPluggableAllocator("libstrandline.so", "strandline_torch_malloc", "strandline_torch_free")
 * and its setters (set_init_fn, set_reset_fn, set_memory_fraction_fn, set_base_alloc_fn, set_record_stream_fn,
 * set_end_allocate_to_pool, set_release_pool). `strandline run` installs all of them, and more, by itself. They
 * are for torch, or another C++ caller; they do nothing before strandline_start(STRANDLINE_MODE_HEAP, …).
 * strandline_torch_begin_allocate_to_pool (set_begin_allocate_to_pool) takes a std::function and cannot be declared
 * here. Other exported names that begin with strandline_torch_ are the Python package's own and may change.
 *
 * strandline_torch_malloc THROWS c10::OutOfMemoryError, or c10::Error for other failures: never call it from C. */
void *strandline_torch_malloc(size_t size, int device, void *stream);
void strandline_torch_free(void *block, size_t size, int device, void *stream);
void strandline_torch_init(int device_count);
void strandline_torch_reset(void);
void strandline_torch_memory_fraction(double fraction, int device);
void *strandline_torch_base_alloc(void *block, size_t *size);
void strandline_torch_record_stream(void *block, void *stream);
void strandline_torch_end_allocate_to_pool(int device, uint64_t pool_first, uint64_t pool_second);
void strandline_torch_release_pool(int device, uint64_t pool_first, uint64_t pool_second);

#ifdef __cplusplus
}
#endif
#endif /* STRANDLINE_H */
