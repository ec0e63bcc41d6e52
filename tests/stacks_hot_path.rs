//! A capture that was seen before allocates nothing, with native frames too, and threads agree on IDs.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use strandline::stacks::{self, Kind, Options, StackId};

/// Counts the calling thread's allocations.
struct Counting;

thread_local! {
    static COUNT: Cell<u64> = const { Cell::new(0) };
}

// SAFETY: hands everything to the system allocator; the count is a thread-local without a destructor.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        COUNT.set(COUNT.get() + 1);
        // SAFETY: the caller's promise, passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise, passed on.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn start() {
    stacks::start(Options::default());
}

#[inline(never)]
fn down(depth: u32, work: &mut dyn FnMut()) {
    if depth == 0 {
        work();
    } else {
        down(depth - 1, work);
    }
    std::hint::black_box(depth); // neither call is a tail call, which would leave no frame
}

#[test]
fn without_python_there_are_native_frames_and_a_reason() {
    start();
    let status = stacks::start(Options::default());
    assert!(status.python.unwrap_err().to_string().contains("no Python"));
    let mut id = StackId::NONE;
    down(5, &mut || id = stacks::capture());
    let frames = stacks::frames(id);
    assert!(frames.iter().all(|frame| frame.kind == Kind::Native));
    let downs: Vec<_> =
        frames.iter().filter(|frame| frame.function.contains("stacks_hot_path::down")).collect();
    assert_eq!(downs.len(), 6, "{frames:#?}");
    assert!(
        downs.iter().all(|frame| frame.user),
        "without Python the program's own functions are the user's"
    );
    assert!(stacks::allocated_at(id).is_some());
}

#[test]
fn a_hit_allocates_nothing() {
    start();
    let mut ids = [StackId::NONE; 2];
    let mut allocated = 0;
    down(20, &mut || {
        for round in 0..1000 {
            let before = COUNT.get();
            ids[round % 2] = if round % 4 < 2 { stacks::capture() } else { stacks::capture_with_native() };
            if round > 10 {
                allocated += COUNT.get() - before;
            }
        }
    });
    assert_ne!(ids[0], StackId::NONE);
    assert_eq!(allocated, 0);
}

#[test]
fn one_place_is_one_stack_in_every_thread() {
    start();
    fn here() -> StackId {
        stacks::capture()
    }
    // The caller of the thread's closure differs by nothing, so the stacks are the same.
    let ids: Vec<_> = (0..8).map(|_| std::thread::spawn(here)).map(|thread| thread.join().unwrap()).collect();
    assert!(ids.iter().all(|id| *id == ids[0] && *id != StackId::NONE), "{ids:?}");
}

#[test]
fn numbers_that_were_never_given_out_have_no_frames() {
    start();
    assert!(stacks::frames(StackId::NONE).is_empty());
    assert!(stacks::frames(StackId::OVERFLOW).is_empty());
    assert_eq!(stacks::allocated_at(StackId(u32::MAX - 5)), None);
}
