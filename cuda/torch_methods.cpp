// Methods of torch::cuda::CUDAPluggableAllocator, replaced for the one object that serves strandline.
//
// Each function has the machine-level form of the method it stands for: a hidden pointer to the result
// first where the result is a class, then `this`. They are put into a copy of the object's vtable
// (src/attach/torch/methods.rs), so other allocators of the process are not touched, and a process in
// which strandline is not the allocator never sees them. Must not know: how memory is managed.
// Invariant: the Rust side has returned before anything is thrown.
#include "torch_shim.h"

#include <pthread.h>
#include <stdlib.h>

namespace strandline {
namespace {

// cudaError_t.
constexpr int ERROR_UNKNOWN = 999;

// ---- out-of-memory observers: registered rarely, never removed ---------------------------------------
struct Observer {
    Function call;
    Observer *next;
};
Observer *observers = nullptr;
pthread_mutex_t observers_lock = PTHREAD_MUTEX_INITIALIZER;

// ---- std::shared_ptr<void> for memory of another process ---------------------------------------------
// The control block that libstdc++'s shared_ptr expects: these virtual functions, then the two counts.
struct Control {
    void *const *functions;
    int uses = 1, weak_uses = 1;
    void *object;
};

void control_dispose(Control *self) { strandline_internal_close_shared(self->object); }

void *const control_functions[] = {
    reinterpret_cast<void *>(control_nothing),  // complete destructor
    reinterpret_cast<void *>(control_destroy),  // deleting destructor
    reinterpret_cast<void *>(control_dispose),  // _M_dispose
    reinterpret_cast<void *>(control_destroy),  // _M_destroy
    reinterpret_cast<void *>(control_deleter),  // _M_get_deleter
};

}  // namespace

void tell_observers(int device, size_t size) {
    pthread_mutex_lock(&observers_lock);
    Observer *first = observers;
    pthread_mutex_unlock(&observers_lock);
    if (!first) return;
    size_t free_bytes = 0, total = 0;
    strandline_internal_memory_info(device, &free_bytes, &total);
    for (Observer *it = first; it; it = it->next) {
        auto invoke =
            reinterpret_cast<void (*)(const void *, int64_t *, size_t *, size_t *, size_t *)>(it->call.invoker);
        int64_t index = device;
        invoke(&it->call, &index, &size, &total, &free_bytes);
    }
}

}  // namespace strandline

using namespace strandline;

extern "C" {

// Found by the Rust side in the running torch before any method is replaced.
STRANDLINE_HIDDEN int (*strandline_cxx_get_device)(int8_t *) = nullptr;
STRANDLINE_HIDDEN CudaStream (*strandline_cxx_current_stream)(int8_t) = nullptr;
STRANDLINE_HIDDEN void *(*strandline_cxx_raw_stream)(const CudaStream *) = nullptr;
// The methods that were replaced and are still needed.
STRANDLINE_HIDDEN int (*strandline_cxx_own_memcpy)(void *, void *, int, const void *, int, size_t, void *, bool) = nullptr;
STRANDLINE_HIDDEN void (*strandline_cxx_own_enable_peer)(void *, int8_t, int8_t) = nullptr;

static inline int8_t current_device() {
    int8_t device = 0;
    strandline_cxx_get_device(&device);
    return device;
}

static inline void *current_stream(int8_t device) {
    CudaStream stream = strandline_cxx_current_stream(device);
    return strandline_cxx_raw_stream(&stream);
}

STRANDLINE_HIDDEN DataPtr *strandline_method_allocate(DataPtr *out, void *, size_t size) {
    int8_t device = current_device();
    void *at = size ? allocate_or_raise(size, device, current_stream(device)) : nullptr;
    *out = DataPtr{at, strandline_internal_free, at, CUDA, device};
    return out;
}

STRANDLINE_HIDDEN void *strandline_method_raw_alloc(void *, size_t size) {
    if (size == 0) return nullptr;
    int8_t device = current_device();
    return allocate_or_raise(size, device, current_stream(device));
}

STRANDLINE_HIDDEN void *strandline_method_raw_alloc_with_stream(void *, size_t size, void *stream) {
    if (size == 0) return nullptr;
    return allocate_or_raise(size, current_device(), stream);
}

STRANDLINE_HIDDEN void strandline_method_raw_delete(void *, void *at) {
    strandline_internal_free(at);
}

STRANDLINE_HIDDEN void (*strandline_method_raw_deleter(const void *))(void *) {
    return strandline_internal_free;
}

STRANDLINE_HIDDEN double strandline_method_get_memory_fraction(void *, int8_t device) {
    return strandline_internal_memory_fraction(device);
}

STRANDLINE_HIDDEN void strandline_method_cache_info(void *, int8_t device, size_t *largest) {
    size_t found = strandline_internal_largest_available(device);
    if (found > *largest) *largest = found;
}

// `out` is a c10::CachingDeviceAllocator::DeviceStats; the Rust side writes the whole of it.
STRANDLINE_HIDDEN void *strandline_method_get_device_stats(void *out, void *, int8_t device) {
    if (strandline_internal_stats(device, out) != OK)
        raise_text("strandline has no statistics of this device: nothing was allocated on it yet");
    return out;
}

STRANDLINE_HIDDEN void strandline_method_reset_peak(void *, int8_t device) {
    strandline_internal_reset_peak(device);
}

STRANDLINE_HIDDEN void strandline_method_reset_accumulated(void *, int8_t device) {
    strandline_internal_reset_accumulated(device);
}

STRANDLINE_HIDDEN void strandline_method_empty_cache(void *, PoolId pool) {
    strandline_internal_empty_cache(pool.first, pool.second);
}

// Before torch 2.8 there was no pool to name.
STRANDLINE_HIDDEN void strandline_method_empty_all(void *) {
    strandline_internal_empty_cache(0, 0);
}

STRANDLINE_HIDDEN void strandline_method_record_history(void *, bool enabled, void *, size_t entries) {
    strandline_internal_record_history(enabled, entries);
}

STRANDLINE_HIDDEN bool strandline_method_is_history_enabled(void *) {
    return strandline_internal_history_enabled() != 0;
}

STRANDLINE_HIDDEN void strandline_method_attach_observer(void *, const Function *observer) {
    auto *kept = static_cast<Observer *>(malloc(sizeof(Observer)));
    if (!kept) return;
    if (!clone_function(&kept->call, observer)) {
        free(kept);
        return;
    }
    pthread_mutex_lock(&observers_lock);
    kept->next = observers;
    observers = kept;
    pthread_mutex_unlock(&observers_lock);
}

STRANDLINE_HIDDEN int strandline_method_get_pool_use_count(void *, int8_t device, PoolId pool) {
    return strandline_internal_pool_uses(device, pool.first, pool.second);
}

// `allocator` is a hidden std::shared_ptr (2.9 and later) or a plain pointer: in both, a first word of 0
// says that the pool takes its memory from the current allocator.
STRANDLINE_HIDDEN void strandline_method_create_or_incref_pool(void *, int8_t device, PoolId pool, void *const *allocator) {
    if (allocator && *allocator) {
        raise_text(
            "strandline cannot make a MemPool with another allocator: its segments would come from two. "
            "Use torch.cuda.MemPool() without one, or run this job with --mode observer.");
        return;
    }
    strandline_internal_hold_pool(device, pool.first, pool.second);
}

// MemPool's destructor calls this with false.
STRANDLINE_HIDDEN void strandline_method_set_use_on_oom(void *, int8_t, PoolId, bool use) {
    if (use)
        raise_text(
            "strandline does not support torch.cuda.MemPool(use_on_oom=True): before an allocation fails, idle "
            "memory is taken from every pool anyway.");
}

// Idle memory is taken from every pool anyway.
STRANDLINE_HIDDEN void strandline_method_ignore_use_on_oom(void *, int8_t, PoolId) {}

STRANDLINE_HIDDEN bool strandline_method_check_pool_live(void *, int8_t device, PoolId pool, const PointerSet *expected) {
    auto **blocks = static_cast<void **>(malloc((expected->size + 1) * sizeof(void *)));
    if (!blocks) return false;
    size_t count = 0;
    for (auto *node = expected->first; node && count < expected->size; node = node->next)
        blocks[count++] = node->value;
    int answer = strandline_internal_pool_holds(device, pool.first, pool.second, blocks, count);
    free(blocks);
    if (answer < 0) raise_text("strandline cannot list the live blocks of this pool");
    return answer == 1;
}

STRANDLINE_HIDDEN void strandline_method_enable_peer(void *self, int8_t device, int8_t peer) {
    if (strandline_cxx_own_enable_peer) strandline_cxx_own_enable_peer(self, device, peer);
    // torch's own reaches cudaMalloc memory only; mapped memory is opened by name. `device` wants to reach
    // the memory of `peer`.
    strandline_internal_enable_peer(peer, device);
}

STRANDLINE_HIDDEN int strandline_method_memcpy_async(void *self, void *to, int to_device, const void *from,
                                                     int from_device, size_t size, void *stream, bool peers) {
    if (peers || to_device == from_device)
        return strandline_cxx_own_memcpy(self, to, to_device, from, from_device, size, stream, peers);
    // Without peer access an ordinary copy cannot reach mapped memory.
    return strandline_internal_copy_between(to, to_device, from, from_device, size, stream) ? ERROR_UNKNOWN : 0;
}

STRANDLINE_HIDDEN ShareableHandle *strandline_method_share_ipc(ShareableHandle *out, void *, void *at) {
    long offset = 0;
    char *text = nullptr, *message = nullptr;
    size_t length = 0;
    int status = strandline_internal_share(at, &offset, &text, &length, &message);
    if (status != OK) {
        raise(status, message);
        return out;
    }
    out->offset = offset;
    bool made = make_string(&out->handle, text, length);
    free(text);
    if (!made) raise_text("strandline found no std::string to share a handle with");
    return out;
}

STRANDLINE_HIDDEN SharedPtr *strandline_method_open_ipc(SharedPtr *out, void *, const String *handle) {
    void *at = nullptr;
    char *message = nullptr;
    int status = strandline_internal_open_shared(handle->text, handle->length, &at, &message);
    if (status != OK) {
        raise(status, message);
        return out;
    }
    auto *control = static_cast<Control *>(malloc(sizeof(Control)));
    if (!control) {
        strandline_internal_close_shared(at);
        raise_text("strandline: no host memory for a shared handle");
        return out;
    }
    *control = Control{control_functions, 1, 1, at};
    *out = SharedPtr{at, control};
    return out;
}

}  // extern "C"
