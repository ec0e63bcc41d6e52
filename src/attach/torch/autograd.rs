//! The forward line of a backward allocation.
//!
//! Autograd threads have no Python frames: a block born there has no line of its own. But torch numbers the
//! operators that a thread records, and the node that computes a gradient remembers its number. So the
//! first allocation after a new number was given out (the operator's output) notes its stack under that
//! number, and an allocation under a node looks the stack up. Must not know: what a stack is (a number
//! here). Invariants: bounded memory (the oldest notes are overwritten); nothing here allocates or locks;
//! before [`start`] every call answers "unknown" at the cost of one load.
//!
//! What it cannot do: an operator that allocates nothing in the forward pass leaves no note; a number that
//! was given out more than 65,536 recorded operators ago is forgotten.

use std::ffi::{CStr, c_void};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// How many operators are remembered. A power of two.
const NOTES: usize = 1 << 16;

static RUNNING: AtomicBool = AtomicBool::new(false);
/// Tag in the upper half, stack in the lower.
static TABLE: [AtomicU64; NOTES] = [const { AtomicU64::new(0) }; NOTES];

unsafe extern "C" {
    static mut strandline_cxx_current_node: *mut c_void;
    static mut strandline_cxx_next_sequence: *mut c_void;
    static mut strandline_cxx_thread: *mut c_void;
    fn strandline_cxx_node(sequence: *mut u64, thread: *mut u64) -> bool;
    fn strandline_cxx_node_is(node: *const c_void, sequence: u64) -> bool;
}

/// Finds torch's functions, and compares what we read of a node with what torch says of it. `node` is the
/// address of a node that this thread made and that lives through the call. True: running from now on.
///
/// # Safety
/// `node` is a live `torch::autograd::Node`.
pub unsafe fn start(node: *const c_void, sequence: u64) -> bool {
    let find = |name: &CStr| {
        // SAFETY: a name; nothing is loaded by this.
        let library =
            unsafe { libc::dlopen(c"libtorch_cpu.so".as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD) };
        if library.is_null() {
            return std::ptr::null_mut();
        }
        // SAFETY: an open library's handle.
        unsafe { libc::dlsym(library, name.as_ptr()) }
    };
    let current_node = find(c"_ZN5torch8autograd16get_current_nodeEv");
    let next_sequence = find(c"_ZN2at15sequence_number4peekEv");
    let thread = find(c"_ZN2at14RecordFunction15currentThreadIdEv");
    if node.is_null() || current_node.is_null() || next_sequence.is_null() || thread.is_null() {
        return false;
    }
    // SAFETY: written before RUNNING is set, always with the same values; `node` as promised.
    let agrees = unsafe {
        strandline_cxx_current_node = current_node;
        strandline_cxx_next_sequence = next_sequence;
        strandline_cxx_thread = thread;
        strandline_cxx_node_is(node, sequence)
    };
    RUNNING.store(agrees, Ordering::Release);
    agrees
}

/// Called for an allocation with its stack (0: none). Notes it for the operator that is being recorded, and
/// answers the forward stack of the node that is being evaluated, if one is and it is known.
#[inline]
pub fn link(stack: u32) -> Option<u32> {
    if !RUNNING.load(Ordering::Acquire) {
        return None;
    }
    let (mut sequence, mut thread) = (0, 0);
    // SAFETY: `start` has found the functions; two places for a word each.
    let in_backward = unsafe { strandline_cxx_node(&mut sequence, &mut thread) };
    if stack != 0 {
        // SAFETY: `start` has found the functions, whose types these are.
        let (next, own) = unsafe {
            let peek: extern "C" fn() -> u64 = std::mem::transmute(strandline_cxx_next_sequence);
            let current: extern "C" fn() -> u64 = std::mem::transmute(strandline_cxx_thread);
            (peek(), current())
        };
        if next > 0 {
            note(next - 1, own, stack);
        }
    }
    if in_backward { look_up(sequence, thread) } else { None }
}

/// The place of an operator's note, and the tag that tells it from others in that place.
fn place(sequence: u64, thread: u64) -> (&'static AtomicU64, u64) {
    let index = (sequence ^ thread.wrapping_mul(0x9E37_79B9)) as usize % NOTES;
    // Never 0, so that an empty place belongs to nobody.
    let tag = (sequence / NOTES as u64) as u32 ^ (thread as u32).wrapping_mul(0x85EB_CA6B) | 1 << 31;
    (&TABLE[index], u64::from(tag))
}

/// The first note of an operator stays: later allocations under the same number are not its own.
fn note(sequence: u64, thread: u64, stack: u32) {
    let (place, tag) = place(sequence, thread);
    if place.load(Ordering::Relaxed) >> 32 != tag {
        place.store(tag << 32 | u64::from(stack), Ordering::Relaxed);
    }
}

fn look_up(sequence: u64, thread: u64) -> Option<u32> {
    let (place, tag) = place(sequence, thread);
    let found = place.load(Ordering::Relaxed);
    (found >> 32 == tag).then_some(found as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_note_of_an_operator_stays() {
        note(70_000, 3, 11);
        note(70_000, 3, 12);
        assert_eq!(look_up(70_000, 3), Some(11));
        assert_eq!(look_up(70_000, 4), None);
        assert_eq!(look_up(70_000 - NOTES as u64, 3), None);
        // A later operator in the same place takes it over.
        note(70_000 + NOTES as u64, 3, 13);
        assert_eq!(look_up(70_000, 3), None);
        assert_eq!(look_up(70_000 + NOTES as u64, 3), Some(13));
    }

    #[test]
    fn nothing_is_known_before_the_start() {
        assert_eq!(link(5), None);
        // SAFETY: null is refused.
        assert!(!unsafe { start(std::ptr::null(), 0) });
    }
}
