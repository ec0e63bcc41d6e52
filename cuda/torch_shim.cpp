// The functions that torch's CUDAPluggableAllocator is given, where they must be C++: the one that may
// throw, and the one that receives a std::function.
//
// Must not know: how memory is managed. Invariant: the Rust side has returned before anything is thrown.
#include "torch_shim.h"

#include <stdlib.h>

namespace strandline {

// Operations of a std::function's manager (libstdc++'s _Manager_operation).
enum { CLONE = 2, DESTROY = 3 };

void control_destroy(void *self) { free(self); }
void *control_deleter(void *, const void *) { return nullptr; }
void control_nothing(void *) {}

bool clone_function(Function *to, const Function *from) {
    if (!from || !from->manager) return false;
    from->manager(to, from, CLONE);
    to->manager = from->manager;
    to->invoker = from->invoker;
    return true;
}

}  // namespace strandline

using namespace strandline;

extern "C" {

STRANDLINE_HIDDEN void *strandline_cxx_malloc(size_t size, int device, void *stream) {
    return allocate_or_raise(size, device, stream);
}

// `filter` is a std::function<bool(cudaStream_t)> that the caller destroys when this returns.
STRANDLINE_HIDDEN void strandline_cxx_begin_pool(int device, PoolId id, const Function *filter) {
    auto *kept = static_cast<Function *>(malloc(sizeof(Function)));
    if (kept && !clone_function(kept, filter)) {
        free(kept);
        kept = nullptr;
    }
    strandline_internal_begin_pool(device, id.first, id.second, kept);
}

bool strandline_cxx_filter_accepts(const void *filter, void *stream) {
    // An empty filter: all streams.
    if (!filter) return true;
    auto *function = static_cast<const Function *>(filter);
    auto invoke = reinterpret_cast<bool (*)(const void *, void **)>(function->invoker);
    return invoke(function, &stream);
}

void strandline_cxx_filter_drop(void *filter) {
    if (!filter) return;
    auto *function = static_cast<Function *>(filter);
    function->manager(function, function, DESTROY);
    free(function);
}

}  // extern "C"
