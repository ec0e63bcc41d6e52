//! What each thread keeps for itself: the buffer a walk writes to, and the cache of stacks it has just seen.
//!
//! Must not know what frames mean. Invariant: a thread is never inside its own state twice. A capture
//! within a capture (a finalizer, a signal handler) is told so and gives up, as does a thread that is
//! being torn down.

use std::cell::Cell;
use std::ptr::{addr_of, addr_of_mut, null_mut};
use std::sync::Arc;

use super::native::Unwinder;
use super::raw::{RawFrame, same};

/// Most frames of one kind that are ever kept of a stack.
pub const DEEPEST: usize = 256;
/// Python's frames, the native ones, and a marker for each.
const CAPACITY: usize = 2 * (DEEPEST + 1);
/// Slots of the cache; a training step has some hundred stacks, and a slot is 32 bytes.
const SLOTS: usize = 1024;

/// A stack that was seen before.
struct Slot {
    hash: u64,
    id: u32,
    frames: Option<Arc<[RawFrame]>>,
}

/// Direct-mapped, so that a look-up is one compare of hashes and one of frames.
pub struct Cache(Box<[Slot]>);

impl Cache {
    fn new() -> Cache {
        Cache((0..SLOTS).map(|_| Slot { hash: 0, id: 0, frames: None }).collect())
    }

    /// The ID under which exactly these frames were stored.
    #[inline(always)]
    pub fn get(&self, hash: u64, frames: &[RawFrame]) -> Option<u32> {
        let slot = &self.0[Self::place(hash)];
        match &slot.frames {
            Some(stored) if slot.hash == hash && same(stored, frames) => Some(slot.id),
            _ => None,
        }
    }

    pub fn put(&mut self, hash: u64, id: u32, frames: Arc<[RawFrame]>) {
        self.0[Self::place(hash)] = Slot { hash, id, frames: Some(frames) };
    }

    #[inline(always)]
    fn place(hash: u64) -> usize {
        // The multiplication in `fold` leaves its best bits on top.
        (hash >> 54) as usize % SLOTS
    }
}

/// One thread's state.
pub struct Local {
    busy: bool,
    pub frames: [RawFrame; CAPACITY],
    pub cache: Cache,
    pub unwinder: Unwinder,
}

/// Stands in the place of the pointer once the thread is being torn down.
const GONE: *mut Local = 1 as *mut Local;

thread_local! {
    // Without a destructor of its own, so that reading it is one load; `END` frees it.
    static LOCAL: Cell<*mut Local> = const { Cell::new(null_mut()) };
    static END: End = const { End };
}

struct End;

impl Drop for End {
    fn drop(&mut self) {
        let local = LOCAL.replace(GONE);
        if !local.is_null() && local != GONE {
            // SAFETY: made by `Box::into_raw` in `create`, and the place now says GONE. Thread-local
            // destructors do not run in the midst of a capture.
            drop(unsafe { Box::from_raw(local) });
        }
    }
}

#[cold]
fn create() -> *mut Local {
    // Marked first: what is called below may allocate, and with that come back here.
    LOCAL.set(GONE);
    if END.try_with(|_| ()).is_err() {
        return GONE;
    }
    let local = Box::new(Local {
        busy: false,
        frames: [RawFrame::default(); CAPACITY],
        cache: Cache::new(),
        unwinder: Unwinder::new(),
    });
    let local = Box::into_raw(local);
    LOCAL.set(local);
    local
}

/// Says that the state is in use for as long as it lives, also through a panic.
struct Busy(*mut Local);

impl Drop for Busy {
    fn drop(&mut self) {
        // SAFETY: `with` made this from a live state of this thread, which only `End` frees.
        unsafe { addr_of_mut!((*self.0).busy).write(false) };
    }
}

/// Lends the calling thread's state; `None` within a capture of the same thread or at the thread's end.
#[inline]
pub fn with<R>(work: impl FnOnce(&mut Local) -> R) -> Option<R> {
    let mut local = LOCAL.get();
    if local.is_null() {
        local = create();
    }
    // SAFETY: not GONE, so it points to this thread's live state; `busy` is read without making a
    // reference, because an outer capture may hold one.
    if local == GONE || unsafe { addr_of!((*local).busy).read() } {
        return None;
    }
    // SAFETY: as above; from here to the drop of `Busy` every inner call sees `busy` and leaves.
    unsafe { addr_of_mut!((*local).busy).write(true) };
    let _busy = Busy(local);
    // SAFETY: the only reference, by `busy`.
    Some(work(unsafe { &mut *local }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stacks::raw::hash;

    #[test]
    fn a_capture_within_a_capture_is_turned_away() {
        assert_eq!(with(|_| with(|_| ())), Some(None));
        assert_eq!(with(|_| 5), Some(5));
    }

    #[test]
    fn a_thread_at_its_end_is_turned_away() {
        struct Late;
        impl Drop for Late {
            fn drop(&mut self) {
                // Whether `END` ran before this or not, no state may be made that nobody frees.
                let _ = with(|_| ());
            }
        }
        thread_local!(static LATE: Late = const { Late });
        std::thread::spawn(|| {
            LATE.with(|_| ());
            with(|_| ());
        })
        .join()
        .unwrap();
    }

    #[test]
    fn equal_hashes_are_no_hit() {
        let mut cache = Cache::new();
        let frames: Vec<_> = (0..9).map(|i| RawFrame::native(0x1000 + i)).collect();
        let hash = hash(&frames);
        cache.put(hash, 7, frames.clone().into());
        assert_eq!(cache.get(hash, &frames), Some(7));
        assert_eq!(cache.get(hash, &frames[1..]), None);
        assert_eq!(cache.get(hash ^ 1, &frames), None);
    }
}
