// The layouts that strandline declares without torch's headers, compared with torch's headers.
// Compiled (never run) by tests/cuda_layouts.rs against the torch that is installed.
#include <array>
#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <type_traits>
#include <typeinfo>
#include <unordered_set>
#include <utility>
#include <vector>

#include <c10/core/Allocator.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/Exception.h>

#include "../cuda/torch_shim.h"

using c10::CachingDeviceAllocator::DeviceStats;
using c10::cuda::CUDACachingAllocator::ShareableHandle;

// src/attach/torch/stats.rs, by its offsets. A counter is four words, an array of them twelve.
#define STAT(name, words) static_assert(offsetof(DeviceStats, name) == (words) * 8, #name)
STAT(allocation, 0);
STAT(segment, 12);
STAT(active, 24);
STAT(inactive_split, 36);
STAT(allocated_bytes, 48);
STAT(reserved_bytes, 60);
STAT(active_bytes, 72);
STAT(inactive_split_bytes, 84);
STAT(requested_bytes, 96);
STAT(num_alloc_retries, 108);
STAT(num_ooms, 109);
STAT(oversize_allocations, 110);
STAT(oversize_segments, 114);
STAT(num_sync_all_streams, 118);
STAT(num_device_alloc, 119);
STAT(num_device_free, 120);
STAT(max_split_size, 121);
static_assert(sizeof(DeviceStats) == 122 * 8, "DeviceStats");
// Written whole by us into memory that torch destroys: only without a destructor is that right.
static_assert(std::is_trivially_destructible_v<DeviceStats>, "DeviceStats");
using c10::CachingAllocator::Stat;
static_assert(offsetof(Stat, current) == 0 && offsetof(Stat, peak) == 8 && offsetof(Stat, allocated) == 16 &&
                  offsetof(Stat, freed) == 24 && sizeof(Stat) == 32,
              "Stat");
static_assert(int(c10::CachingAllocator::StatType::AGGREGATE) == 0 &&
                  int(c10::CachingAllocator::StatType::SMALL_POOL) == 1 &&
                  int(c10::CachingAllocator::StatType::LARGE_POOL) == 2,
              "the order of pools");

static_assert(sizeof(c10::DataPtr) == sizeof(strandline::DataPtr), "DataPtr");
static_assert(sizeof(c10::Device) == 2, "Device");
static_assert(int(c10::DeviceType::CUDA) == 1, "DeviceType");
static_assert(std::is_same_v<c10::DeviceIndex, int8_t>, "DeviceIndex");
static_assert(sizeof(std::function<bool(cudaStream_t)>) == sizeof(strandline::Function), "std::function");
static_assert(sizeof(std::shared_ptr<void>) == sizeof(strandline::SharedPtr), "std::shared_ptr");
static_assert(sizeof(std::string) == sizeof(strandline::String), "std::string");
static_assert(sizeof(ShareableHandle) == sizeof(strandline::ShareableHandle) &&
                  offsetof(ShareableHandle, handle) == offsetof(strandline::ShareableHandle, handle),
              "ShareableHandle");
using c10::cuda::CUDACachingAllocator::CheckpointDelta;
static_assert(sizeof(CheckpointDelta) == sizeof(strandline::CheckpointDelta) &&
                  offsetof(CheckpointDelta, ptrs_freed) == offsetof(strandline::CheckpointDelta, freed) &&
                  offsetof(CheckpointDelta, dataptrs_allocd) == offsetof(strandline::CheckpointDelta, allocated),
              "CheckpointDelta");
// A state of ours is one pointer to virtual functions, the destructors.
using c10::cuda::CUDACachingAllocator::AllocatorState;
static_assert(sizeof(AllocatorState) == sizeof(void *) && std::is_polymorphic_v<AllocatorState>, "AllocatorState");
static_assert(sizeof(c10::cuda::CUDAStream) == sizeof(strandline::CudaStream) &&
                  std::is_trivially_copyable_v<c10::cuda::CUDAStream>,
              "CUDAStream is returned in registers");
static_assert(std::is_same_v<c10::cuda::MempoolId_t, std::pair<unsigned long long, unsigned long long>> &&
                  sizeof(strandline::PoolId) == sizeof(c10::cuda::MempoolId_t),
              "MempoolId_t");
static_assert(sizeof(c10::OutOfMemoryError) <= 1024 && sizeof(c10::Error) <= 1024, "room for an exception");
static_assert(sizeof(c10::SourceLocation) == 24, "SourceLocation");

// The parts whose order headers cannot tell at compile time: run by the test.
#include <cstdio>
#include <cstring>

static void nothing(void *) {}

int main() {
    int data = 0, context = 0;
    c10::DataPtr pointer(&data, &context, nothing, c10::Device(c10::DeviceType::CUDA, 3));
    strandline::DataPtr ours;
    std::memcpy(&ours, &pointer, sizeof ours);
    if (ours.data != &data || ours.context != &context || ours.deleter != nothing || ours.device_type != 1 ||
        ours.device_index != 3)
        return std::puts("DataPtr"), 1;
    std::string text = "a text that is too long for the small buffer of a string";
    strandline::String string;
    std::memcpy(&string, &text, sizeof string);
    if (string.text != text.data() || string.length != text.size()) return std::puts("std::string"), 1;
    auto shared = std::make_shared<int>(1);
    strandline::SharedPtr words;
    std::memcpy(&words, &shared, sizeof words);
    if (words.object != shared.get() || !words.control) return std::puts("std::shared_ptr"), 1;
    std::vector<void *> vector{&data, &context};
    vector.reserve(7);
    strandline::Vector<void *> three;
    static_assert(sizeof vector == sizeof three, "std::vector");
    std::memcpy(&three, &vector, sizeof three);
    if (three.begin != vector.data() || three.end - three.begin != 2 || three.end_of_room - three.begin != 7)
        return std::puts("std::vector"), 1;
    if (std::strcmp(typeid(AllocatorState).name(), "N3c104cuda20CUDACachingAllocator14AllocatorStateE") != 0)
        return std::puts("AllocatorState's name"), 1;
    std::unordered_set<void *> set{&data, &context};
    auto *nodes = reinterpret_cast<const strandline::PointerSet *>(&set);
    size_t found = 0;
    for (auto *node = nodes->first; node; node = node->next) found += set.count(node->value);
    if (nodes->size != 2 || found != 2) return std::puts("std::unordered_set"), 1;
    void *seen = nullptr;
    std::function<bool(cudaStream_t)> filter = [&](cudaStream_t stream) { return seen = stream, true; };
    auto *function = reinterpret_cast<strandline::Function *>(&filter);
    strandline::Function clone;
    function->manager(&clone, function, 2);
    void *stream = &data;
    if (!reinterpret_cast<bool (*)(const void *, void **)>(function->invoker)(&clone, &stream) || seen != stream)
        return std::puts("std::function"), 1;
    function->manager(&clone, &clone, 3);
    return 0;
}
