//! Any sequence of operations on a small device: every invariant holds after each.
#![no_main]

use libfuzzer_sys::fuzz_target;
use strandline::driver::host::BooksDriver;
use strandline::driver::{DriverError, Stream};
use strandline::heap::{Config, Heap, HeapError, Tag};

fuzz_target!(|bytes: &[u8]| {
    let driver = BooksDriver::with_memory(256 << 20);
    let mut heap = Heap::new(driver.clone(), Config::speed()).unwrap();
    let mut live = Vec::new();
    for op in bytes.chunks_exact(3) {
        let (number, stream) = (u64::from(op[1]) << 8 | u64::from(op[2]), Stream(u64::from(op[0] >> 6)));
        match op[0] & 15 {
            0..=6 => {
                // From 1 byte to 128 MiB, most of them some MiB.
                let size = (number & 0x7ff) << (number >> 11 & 15);
                match heap.malloc_from(u32::from(op[0] & 7), size, stream, Tag(size, 0)) {
                    Ok(at) => live.push((at, size)),
                    Err(HeapError::OutOfMemory { .. } | HeapError::Driver(_)) => {}
                    Err(other) => panic!("{other}"),
                }
            }
            7..=10 if !live.is_empty() => {
                let (at, size) = live.swap_remove(number as usize % live.len());
                assert_eq!(heap.free(at).unwrap().requested, size);
            }
            11 if !live.is_empty() => heap.record_stream(live[number as usize % live.len()].0, stream).unwrap(),
            12 => driver.submit(stream),
            13 => _ = driver.complete(stream, number & 7),
            14 => driver.fail(None, 1 + (number & 15), DriverError::Failed { call: "any", code: 1 }),
            15 if number & 7 == 0 => _ = heap.trim(),
            _ => assert!(live.iter().any(|live| live.0 == number) || heap.free(number).is_err()),
        }
        if let Err(why) = heap.check() {
            panic!("{why}");
        }
    }
    assert_eq!(driver.violations(), 0);
});
