//! The heap over real host memory, as CPU tensors use it: content, and what a forked worker sees.

use strandline::driver::Stream;
use strandline::driver::host::HostDriver;
use strandline::heap::{Address, AddressSpace, Config, Heap, Tag};

const MIB: u64 = 1 << 20;

fn fill(at: Address, size: u64, byte: u8) {
    // SAFETY: the heap has handed out `size` bytes at `at`.
    unsafe { std::ptr::write_bytes(at as *mut u8, byte, size as usize) };
}

fn holds(at: Address, size: u64, byte: u8) -> bool {
    // SAFETY: the heap has handed out `size` bytes at `at`, and they were written.
    let bytes = unsafe { std::slice::from_raw_parts(at as *const u8, size as usize) };
    bytes.iter().all(|&other| other == byte)
}

#[test]
fn content_survives_what_happens_around_it() {
    let mut heap = Heap::new(HostDriver::with_memory(600 * MIB), Config::host()).expect("a heap");
    let mut live: Vec<(Address, u64, u8)> = Vec::new();
    for i in 0..400u64 {
        let size = [70, 900, 9_000, 300_000, 3 * MIB, 11 * MIB][i as usize % 6] + i * 8;
        let at = heap.malloc(size, Stream(0), Tag(i, 0)).expect("memory");
        assert_eq!(at % 64, 0);
        fill(at, size, i as u8);
        live.push((at, size, i as u8));
        // Holes, from which pages are moved to the larger blocks.
        if live.len() > 60 {
            let (at, size, byte) = live.swap_remove((i as usize * 37) % live.len());
            assert!(holds(at, size, byte), "block {byte} of {size}");
            heap.free(at).expect("a live block");
        }
    }
    let big = heap.malloc(200 * MIB, Stream(0), Tag(0, 0)).expect("memory");
    fill(big, 200 * MIB, 255);
    assert!(heap.stats().work.stitched > 0, "pages moved");
    for &(at, size, byte) in &live {
        assert!(holds(at, size, byte), "block {byte} of {size}");
    }
    heap.check().expect("a sound heap");
}

#[test]
fn a_forked_worker_has_its_own_copy() {
    let mut heap = Heap::new(HostDriver::with_memory(256 * MIB), Config::host()).expect("a heap");
    let sizes = [100, 5_000, 60_000, 5 * MIB];
    let blocks: Vec<Address> =
        sizes.iter().map(|&size| heap.malloc(size, Stream(0), Tag(size, 0)).expect("memory")).collect();
    for (&at, &size) in blocks.iter().zip(&sizes) {
        fill(at, size, 1);
    }
    // SAFETY: this test's child uses only the heap, which no other thread holds, and leaves by _exit.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let seen = blocks.iter().zip(&sizes).all(|(&at, &size)| holds(at, size, 1));
        for (&at, &size) in blocks.iter().zip(&sizes) {
            fill(at, size, 2);
        }
        // The child's heap goes on by itself.
        let freed = blocks.iter().all(|&at| heap.free(at).is_ok());
        let again = heap.malloc(30 * MIB, Stream(0), Tag(0, 0)).is_ok_and(|at| {
            fill(at, 30 * MIB, 3);
            heap.free(at).is_ok()
        });
        let trimmed = heap.trim() > 0;
        let good = seen && freed && again && trimmed && heap.check().is_ok();
        // SAFETY: ends the child without unwinding into the test harness.
        unsafe { libc::_exit(if good { 0 } else { 1 }) };
    }
    let mut status = 0;
    // SAFETY: `child` is our own child; status is a valid place for its result.
    unsafe { libc::waitpid(child, &mut status, 0) };
    assert_eq!(status, 0, "the worker saw the content and could go on");
    for (&at, &size) in blocks.iter().zip(&sizes) {
        assert!(holds(at, size, 1), "the worker's writes stay its own");
        assert!(AddressSpace::owns(at));
    }
    heap.check().expect("a sound heap");
}
