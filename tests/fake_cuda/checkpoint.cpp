// What torch's own C++ sees of a pool's state and of the difference that putting it back makes, with torch's own
// headers. Called by the case `checkpoints_in_cpp` of torch_cases.py; answers null, or what is wrong.
#include <algorithm>
#include <memory>
#include <string>
#include <typeinfo>
#include <vector>

#include <c10/cuda/CUDACachingAllocator.h>

namespace allocator = c10::cuda::CUDACachingAllocator;
using allocator::AllocatorState;
using allocator::CheckpointDelta;

#define WANT(condition) \
    if (!(condition)) return #condition

namespace {

// Another allocator's state, as the native one has.
struct Other : AllocatorState {};

bool has(const std::vector<void *> &all, void *one) {
    return std::find(all.begin(), all.end(), one) != all.end();
}

const char *refuses(int8_t device, std::shared_ptr<AllocatorState> state, const char *text) {
    static std::string said;
    try {
        allocator::setCheckpointPoolState(device, std::move(state));
    } catch (const c10::Error &error) {
        said = error.what_without_backtrace();
        return said.find(text) == std::string::npos ? said.c_str() : nullptr;
    }
    return "nothing was thrown";
}

const char *run(unsigned long long first, unsigned long long second, std::vector<void *> blocks) {
    std::shared_ptr<AllocatorState> state = allocator::getCheckpointState(0, {first, second});
    WANT(state && state.use_count() == 1);
    AllocatorState &object = *state;
    WANT(typeid(object) == typeid(AllocatorState));
    WANT(std::string(typeid(object).name()) == typeid(AllocatorState).name());
    WANT(typeid(object).hash_code() == typeid(AllocatorState).hash_code());
    WANT(!typeid(object).before(typeid(AllocatorState)) && !typeid(AllocatorState).before(typeid(object)));
    WANT(dynamic_cast<const void *>(state.get()) == state.get());
    WANT(std::dynamic_pointer_cast<Other>(state) == nullptr);
    std::weak_ptr<AllocatorState> weak = state;
    std::shared_ptr<AllocatorState> copy = state;
    WANT(state.use_count() == 2);

    CheckpointDelta delta = allocator::setCheckpointPoolState(0, copy);
    WANT(state.use_count() == 2);
    WANT(delta.ptrs_freed.size() == blocks.size() && delta.ptrs_freed.capacity() == blocks.size());
    WANT(delta.dataptrs_allocd.size() == blocks.size());
    for (size_t i = 0; i < blocks.size(); ++i) {
        at::DataPtr &pointer = delta.dataptrs_allocd[i];
        WANT(has(blocks, pointer.get()) && pointer.get_context() == pointer.get());
        WANT(has(blocks, delta.ptrs_freed[i]));
        WANT(pointer.get_deleter() == allocator::get()->raw_deleter());
        WANT(pointer.device() == c10::Device(c10::DeviceType::CUDA, 0));
    }
    // More room: what the vectors had goes through the operator delete that this library sees.
    delta.ptrs_freed.reserve(1000);
    delta.dataptrs_allocd.reserve(1000);
    CheckpointDelta moved = std::move(delta);
    // The tensors that have the blocks keep them.
    std::vector<void *> released;
    for (at::DataPtr &pointer : moved.dataptrs_allocd) released.push_back(pointer.release_context());
    for (void *block : blocks) WANT(has(moved.ptrs_freed, block) && has(released, block));

    if (const char *wrong = refuses(0, nullptr, "only to a state")) return wrong;
    if (const char *wrong = refuses(0, std::make_shared<Other>(), "only to a state")) return wrong;
    if (const char *wrong = refuses(1, state, "not of device 1")) return wrong;
    copy.reset();
    WANT(!weak.expired() && state.use_count() == 1);
    state.reset();
    WANT(weak.expired() && !weak.lock());
    try {
        allocator::getCheckpointState(0, {0, 123456});
    } catch (const c10::Error &) {
        return nullptr;
    }
    return "an unknown pool has a state";
}

}  // namespace

extern "C" const char *check_checkpoint(unsigned long long first, unsigned long long second, void **blocks, size_t count) {
    static std::string kept;
    try {
        const char *wrong = run(first, second, std::vector<void *>(blocks, blocks + count));
        if (!wrong) return nullptr;
        kept = wrong;
    } catch (const std::exception &error) {
        kept = error.what();
    }
    return kept.c_str();
}
