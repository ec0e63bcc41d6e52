// Which autograd node the calling thread evaluates, and which one it will make next.
//
// Must not know: stacks. Torch numbers the nodes that a thread makes, and a node remembers its number: so
// an allocation in the forward pass and one in the backward pass of the same operator can be told to
// belong together. Invariant: a node is only read while the engine holds it on this very thread.
#include "torch_shim.h"

namespace strandline {
namespace {

// torch::autograd::Node: its vtable, std::enable_shared_from_this (two words), then these. Compared with
// the running torch's own answers before it is relied on (strandline_torch_autograd).
struct Node {
    void *functions;
    void *self[2];
    uint64_t sequence;
    uint64_t topology;
    bool has_parent;
    uint64_t thread;
};

// What a shared_ptr's control block starts with.
struct ControlBlock {
    void *functions;
    int uses;
};

}  // namespace
}  // namespace strandline

using namespace strandline;

extern "C" {

// Found by the Rust side in libtorch_cpu.so.
STRANDLINE_HIDDEN SharedPtr *(*strandline_cxx_current_node)(SharedPtr *) = nullptr;
STRANDLINE_HIDDEN uint64_t (*strandline_cxx_next_sequence)() = nullptr;
STRANDLINE_HIDDEN uint64_t (*strandline_cxx_thread)() = nullptr;

// The node that is being evaluated on this thread: false if none is.
STRANDLINE_HIDDEN bool strandline_cxx_node(uint64_t *sequence, uint64_t *thread) {
    SharedPtr current = {nullptr, nullptr};
    strandline_cxx_current_node(&current);
    if (!current.object) return false;
    auto *node = static_cast<const Node *>(current.object);
    *sequence = node->sequence;
    *thread = node->thread;
    // Gives our share back; the engine has one of its own, so this is never the last.
    if (current.control)
        __atomic_fetch_sub(&static_cast<ControlBlock *>(current.control)->uses, 1, __ATOMIC_ACQ_REL);
    return true;
}

// Whether a node of this thread has the number that torch says it has.
STRANDLINE_HIDDEN bool strandline_cxx_node_is(const void *node, uint64_t sequence) {
    auto *it = static_cast<const Node *>(node);
    return it->sequence == sequence && it->thread == strandline_cxx_thread();
}

}  // extern "C"
