// What the C++ side of strandline and the Rust side call each other by, and the layouts of C++ objects
// that torch passes. No torch header and no C++ standard header is included: the library is preloaded into
// processes that have neither, so it may need nothing at load time. Every layout here is compared with
// torch's own headers by tests/cuda_layouts.cpp.
#pragma once

#include <stddef.h>
#include <stdint.h>

#define STRANDLINE_HIDDEN __attribute__((visibility("hidden")))

namespace strandline {

// c10::DeviceType::CUDA.
constexpr int8_t CUDA = 1;

// std::pair<unsigned long long, unsigned long long>: two integer registers.
struct PoolId {
    unsigned long long first, second;
};

// std::function of libstdc++.
struct Function {
    void *data[2];
    bool (*manager)(void *to, const void *from, int operation);
    void (*invoker)();
};

// c10::DataPtr: {void *data; std::unique_ptr<void, void (*)(void *)> context; Device device}. A tuple of
// libstdc++ stores its last element first, hence the deleter before the context.
struct DataPtr {
    void *data;
    void (*deleter)(void *);
    void *context;
    int8_t device_type, device_index;
};

// std::shared_ptr.
struct SharedPtr {
    void *object;
    void *control;
};

// std::string, of either ABI of libstdc++: made and destroyed by the process's own libstdc++, never read
// except through `text` and `length`.
struct alignas(8) String {
    const char *text;
    size_t length;
    char rest[16];
};

// c10::cuda::CUDACachingAllocator::ShareableHandle.
struct ShareableHandle {
    ptrdiff_t offset;
    String handle;
};

// c10::cuda::CUDAStream (a c10::Stream: device and number): returned in two integer registers.
struct CudaStream {
    uint64_t device, id;
};

// std::vector.
template <typename T>
struct Vector {
    T *begin, *end, *end_of_room;
};

// c10::cuda::CUDACachingAllocator::CheckpointDelta.
struct CheckpointDelta {
    Vector<void *> freed;
    Vector<DataPtr> allocated;
};

// Addresses in memory of malloc().
struct Addresses {
    void **first;
    size_t count;
};

// libstdc++'s std::unordered_set<void *>: the list of its nodes is all that is read.
struct PointerSet {
    void *buckets;
    size_t bucket_count;
    struct Node {
        Node *next;
        void *value;
    } *first;
    size_t size;
};

// Statuses of the Rust side. 0 is success.
enum Status { OK = 0, OUT_OF_MEMORY = 1, FAILED = 2 };

extern "C" {
// ---- implemented in Rust (src/attach/torch): none throws, none unwinds ------------------------------
// `message` receives text from malloc() where the status is not OK.
STRANDLINE_HIDDEN int strandline_internal_malloc(size_t size, int device, void *stream, void **out, char **message);
STRANDLINE_HIDDEN void strandline_internal_free(void *at);
STRANDLINE_HIDDEN int strandline_internal_stats(int device, void *out);
STRANDLINE_HIDDEN void strandline_internal_reset_peak(int device);
STRANDLINE_HIDDEN void strandline_internal_reset_accumulated(int device);
STRANDLINE_HIDDEN double strandline_internal_memory_fraction(int device);
STRANDLINE_HIDDEN size_t strandline_internal_largest_available(int device);
STRANDLINE_HIDDEN void strandline_internal_empty_cache(unsigned long long first, unsigned long long second);
STRANDLINE_HIDDEN void strandline_internal_begin_pool(int device, unsigned long long first, unsigned long long second, void *filter);
STRANDLINE_HIDDEN void strandline_internal_hold_pool(int device, unsigned long long first, unsigned long long second);
STRANDLINE_HIDDEN int strandline_internal_pool_uses(int device, unsigned long long first, unsigned long long second);
// Whether the pool's live blocks are exactly these: 1, 0, or -1 where that is not known.
STRANDLINE_HIDDEN int strandline_internal_pool_holds(int device, unsigned long long first, unsigned long long second, void *const *blocks, size_t count);
// What a pool has handed out, as a state that is given back once; and putting the pool back to it.
STRANDLINE_HIDDEN int strandline_internal_checkpoint(int device, unsigned long long first, unsigned long long second, void **state, char **message);
STRANDLINE_HIDDEN void strandline_internal_drop_checkpoint(void *state);
STRANDLINE_HIDDEN int strandline_internal_restore(int device, const void *state, Addresses *freed, Addresses *allocated, char **message);
STRANDLINE_HIDDEN void strandline_internal_record_history(int enabled, size_t entries);
STRANDLINE_HIDDEN int strandline_internal_history_enabled(void);
STRANDLINE_HIDDEN void strandline_internal_enable_peer(int device, int peer);
STRANDLINE_HIDDEN int strandline_internal_copy_between(void *to, int to_device, const void *from, int from_device, size_t size, void *stream);
// A handle for another process, as text from malloc() in `handle`; and a handle of another process.
STRANDLINE_HIDDEN int strandline_internal_share(void *at, long *offset, char **handle, size_t *length, char **message);
STRANDLINE_HIDDEN int strandline_internal_open_shared(const char *handle, size_t length, void **at, char **message);
STRANDLINE_HIDDEN void strandline_internal_close_shared(void *at);
// What the driver says of a device's memory, for out-of-memory observers.
STRANDLINE_HIDDEN void strandline_internal_memory_info(int device, size_t *free_bytes, size_t *total);

// ---- implemented in C++, called from Rust --------------------------------------------------------------
STRANDLINE_HIDDEN bool strandline_cxx_filter_accepts(const void *filter, void *stream);
STRANDLINE_HIDDEN void strandline_cxx_filter_drop(void *filter);
}

// Throws c10::OutOfMemoryError (OUT_OF_MEMORY) or c10::Error with `message`, which it frees. Returns only
// where the process has no torch and no libstdc++ to throw with.
STRANDLINE_HIDDEN void raise(int status, char *message);

// As `raise`, with constant text.
STRANDLINE_HIDDEN void raise_text(const char *message);

// Makes a std::string of the process's own kind at `place`; false where there is none.
STRANDLINE_HIDDEN bool make_string(String *place, const char *text, size_t length);

// Memory that the process's own operator delete takes back; null where there is none.
STRANDLINE_HIDDEN void *operator_new(size_t size);

// The virtual functions of a std::type_info of a class without bases; null where there is no libstdc++.
STRANDLINE_HIDDEN void **type_info_functions();

// Functions of a std::shared_ptr's control block that need not know what it holds; it has memory of malloc().
STRANDLINE_HIDDEN void control_destroy(void *self);
STRANDLINE_HIDDEN void *control_deleter(void *self, const void *type);
STRANDLINE_HIDDEN void control_nothing(void *self);

// Copies a std::function; false if it is empty.
STRANDLINE_HIDDEN bool clone_function(Function *to, const Function *from);

// Tells the out-of-memory observers that torch registered.
STRANDLINE_HIDDEN void tell_observers(int device, size_t size);

// Allocates or throws; never returns null for a size above 0 in a process with torch.
inline void *allocate_or_raise(size_t size, int device, void *stream) {
    if (__builtin_expect(size == 0, 0)) return nullptr;
    void *at = nullptr;
    char *message = nullptr;
    int status = strandline_internal_malloc(size, device, stream, &at, &message);
    if (__builtin_expect(status == OK, 1)) return at;
    if (status == OUT_OF_MEMORY) tell_observers(device, size);
    raise(status, message);
    return nullptr;
}

}  // namespace strandline
