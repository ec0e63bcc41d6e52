// Checkpoints of pools, in the form that torch's graph trees want: getCheckpointState and
// setCheckpointPoolState of torch::cuda::CUDAPluggableAllocator, replaced as those of torch_methods.cpp are.
//
// A state is an object that looks to C++ like torch's c10::cuda::CUDACachingAllocator::AllocatorState: torch
// keeps it by a std::shared_ptr, destroys it by that, and hands it through Python, where pybind11 asks for its
// type. Must not know: what is in a checkpoint. Invariants: as in torch_methods.cpp; memory of a std::vector
// that torch destroys comes from the operator new of the process.
#include "torch_shim.h"

#include <pthread.h>
#include <stdlib.h>

namespace strandline {
namespace {

// std::type_info of a class without bases: the functions are libstdc++'s.
struct TypeInfo {
    void **functions;
    const char *name;
};

// Everything that there is of one state: the control block of its std::shared_ptr, and the object behind it.
struct State {
    void *const *control_functions;
    int uses, weak_uses;
    struct Object {
        void *const *functions;
        void *checkpoint;
    } object;
};

void state_dispose(State *self) {
    strandline_internal_drop_checkpoint(self->object.checkpoint);
    self->object.checkpoint = nullptr;
}

void *const control_functions[] = {
    reinterpret_cast<void *>(control_nothing),  // complete destructor
    reinterpret_cast<void *>(control_destroy),  // deleting destructor
    reinterpret_cast<void *>(state_dispose),  // _M_dispose
    reinterpret_cast<void *>(control_destroy),  // _M_destroy
    reinterpret_cast<void *>(control_deleter),  // _M_get_deleter
};

// The object is never deleted by itself: the control block has the memory.
void object_nothing(State::Object *) {}

// AllocatorState's own name: types are the same where their names are, and there is no class in between.
TypeInfo state_type = {nullptr, "N3c104cuda20CUDACachingAllocator14AllocatorStateE"};

// An object's pointer to its virtual functions points behind the first two words.
void *const object_functions[] = {
    nullptr,  // the offset to the whole object
    &state_type,
    reinterpret_cast<void *>(object_nothing),  // complete destructor
    reinterpret_cast<void *>(object_nothing),  // deleting destructor
};

pthread_once_t once = PTHREAD_ONCE_INIT;

void find_type_functions() { state_type.functions = type_info_functions(); }

// Whether a state came from `strandline_method_get_checkpoint_state`.
bool is_ours(const SharedPtr *state) {
    auto *object = static_cast<const State::Object *>(state->object);
    return object && object->functions == object_functions + 2 && object->checkpoint;
}

// Room for so many elements of a std::vector; false where there is none.
template <typename T>
bool make_room(Vector<T> *vector, size_t count) {
    if (count == 0) return true;
    auto *first = static_cast<T *>(operator_new(count * sizeof(T)));
    if (!first) return false;
    *vector = Vector<T>{first, first + count, first + count};
    return true;
}

}  // namespace
}  // namespace strandline

using namespace strandline;

extern "C" {

STRANDLINE_HIDDEN SharedPtr *strandline_method_get_checkpoint_state(SharedPtr *out, void *, int8_t device, PoolId pool) {
    *out = SharedPtr{nullptr, nullptr};
    pthread_once(&once, find_type_functions);
    if (!state_type.functions) {
        raise_text("strandline found no libstdc++ to describe the state of a pool with");
        return out;
    }
    auto *state = static_cast<State *>(malloc(sizeof(State)));
    if (!state) {
        raise_text("strandline: no host memory for the state of a pool");
        return out;
    }
    *state = State{control_functions, 1, 1, {object_functions + 2, nullptr}};
    char *message = nullptr;
    int status = strandline_internal_checkpoint(device, pool.first, pool.second, &state->object.checkpoint, &message);
    if (status != OK) {
        free(state);
        raise(status, message);
        return out;
    }
    *out = SharedPtr{&state->object, state};
    return out;
}

// `state` is a std::shared_ptr that the caller destroys. Who gets the result owns the blocks that were handed
// out; torch leaves them with the tensors that have them already, or gives them to those.
STRANDLINE_HIDDEN CheckpointDelta *strandline_method_set_checkpoint_pool_state(CheckpointDelta *out, void *, int8_t device,
                                                                               const SharedPtr *state) {
    *out = CheckpointDelta{};
    if (!is_ours(state)) {
        raise_text("strandline can put a pool back only to a state that its own getCheckpointState gave");
        return out;
    }
    auto *object = static_cast<const State::Object *>(state->object);
    Addresses freed = {}, allocated = {};
    char *message = nullptr;
    int status = strandline_internal_restore(device, object->checkpoint, &freed, &allocated, &message);
    if (status != OK) {
        raise(status, message);
        return out;
    }
    bool made = make_room(&out->freed, freed.count) && make_room(&out->allocated, allocated.count);
    if (made) {
        for (size_t i = 0; i < freed.count; ++i) out->freed.begin[i] = freed.first[i];
        for (size_t i = 0; i < allocated.count; ++i) {
            void *at = allocated.first[i];
            out->allocated.begin[i] = DataPtr{at, strandline_internal_free, at, CUDA, device};
        }
    }
    free(freed.first);
    free(allocated.first);
    // The pool has been put back; nobody is left who could be told of its blocks.
    if (!made) raise_text("strandline: no host memory for the blocks of a pool");
    return out;
}

}  // extern "C"
