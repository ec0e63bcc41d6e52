//! Every driver call of a workload fails once, in turn: the heap returns an error or copes, stays sound,
//! and serves what comes after.

use strandline::driver::host::{BooksDriver, Options};
use strandline::driver::{DriverError, Stream};
use strandline::heap::{Address, Config, Heap, HeapError, PoolId, Tag};

const MIB: u64 = 1 << 20;

/// Growth, stitching, two streams, pending frees, a pool, pressure and trimming. Returns the errors.
fn workload(driver: &BooksDriver, heap: &mut Heap<BooksDriver>) -> usize {
    let mut errors = 0;
    let mut live: Vec<Address> = Vec::new();
    let (a, b) = (Stream(0), Stream(1));
    let ask = |heap: &mut Heap<BooksDriver>, live: &mut Vec<Address>, size: u64, stream| {
        match heap.malloc(size, stream, Tag(size, 0)) {
            Ok(at) => live.push(at),
            Err(HeapError::OutOfMemory { .. } | HeapError::Driver(_)) => return 1,
            Err(other) => panic!("{other}"),
        }
        0
    };
    let sound = |heap: &Heap<BooksDriver>| {
        if let Err(error) = heap.check() {
            panic!("{error}");
        }
    };
    for round in 0..3 {
        for i in 0..12 {
            errors += ask(heap, &mut live, (1 + i) * 2 * MIB + 512 * round, a);
            errors += ask(heap, &mut live, 700 * (i + 1), if i % 2 == 0 { a } else { b });
            errors += ask(heap, &mut live, 90_000 * (i + 1), b);
            sound(heap);
        }
        driver.submit(a);
        driver.submit(b);
        for (i, &at) in live.iter().enumerate() {
            if i % 5 == 0 {
                heap.record_stream(at, Stream(2)).expect("a live block");
            }
        }
        driver.submit(Stream(2));
        // Every other block goes: what is left keeps holes open.
        let mut index = 0;
        live.retain(|&at| {
            index += 1;
            if index % 2 == 0 {
                heap.free(at).expect("a live block");
            }
            index % 2 == 1
        });
        sound(heap);
        errors += ask(heap, &mut live, 60 * MIB, b);
        driver.complete(a, 1);
        driver.complete(Stream(2), 1);
        errors += ask(heap, &mut live, 90 * MIB, a);
        errors += ask(heap, &mut live, 400 * MIB, a);
        sound(heap);
        heap.trim();
        sound(heap);
        let pool = PoolId(1 + round, 0);
        heap.begin_pool(pool, Box::new(|stream| stream == Stream(7))).expect("a new pool");
        errors += ask(heap, &mut live, 8 * MIB, Stream(7));
        heap.end_pool(pool).expect("the pool");
        heap.release_pool(pool).expect("the pool");
        sound(heap);
    }
    for at in live {
        heap.free(at).expect("a live block");
    }
    sound(heap);
    errors
}

fn options(virtual_memory: bool) -> Options {
    Options { memory: 380 * MIB, virtual_memory, ..Options::default() }
}

fn sweep(virtual_memory: bool, error: DriverError) {
    let clean = BooksDriver::new(options(virtual_memory));
    let mut heap = Heap::new(clean.clone(), Config::lean()).expect("a heap");
    // One request is meant to be too large, three times.
    let usual = workload(&clean, &mut heap);
    let calls = clean.calls().total();
    assert!(calls > 100, "the workload makes {calls} calls");
    assert!(!virtual_memory || heap.stats().work.stitched > 0);
    drop(heap);
    assert_eq!((clean.created(), clean.violations()), (0, 0));
    let mut noticed = 0;
    // The first call asks for the device's size, at the heap's birth.
    for nth in 1..calls {
        let driver = BooksDriver::new(options(virtual_memory));
        let mut heap = Heap::new(driver.clone(), Config::lean()).expect("a heap");
        driver.fail(None, nth, error.clone());
        let errors = workload(&driver, &mut heap);
        noticed += u64::from(errors > usual);
        driver.clear_faults();
        for stream in 0..3 {
            driver.complete(Stream(stream), u64::MAX);
        }
        // The heap is as good as new.
        heap.trim();
        heap.check().expect("a sound heap");
        assert_eq!(heap.stats().active.all.current, 0, "nothing stays pending after fault {nth}");
        assert_eq!(heap.reserved(), 0, "nothing stays behind after fault {nth}");
        let at = heap.malloc(300 * MIB, Stream(0), Tag::default()).expect("memory after the fault");
        heap.free(at).expect("a live block");
        assert_eq!(driver.violations(), 0, "fault {nth}");
        drop(heap);
        assert_eq!(driver.created(), 0, "fault {nth}");
    }
    println!("{calls} calls, {noticed} of their faults reached the caller");
}

#[test]
fn any_call_may_fail() {
    sweep(true, DriverError::Failed { call: "any", code: 999 });
}

#[test]
fn any_call_may_run_out_of_memory() {
    sweep(true, DriverError::OutOfMemory);
}

#[test]
fn any_call_may_fail_without_virtual_memory() {
    sweep(false, DriverError::Failed { call: "any", code: 999 });
}

#[test]
fn a_device_that_shrinks_is_survived() {
    let driver = BooksDriver::with_memory(400 * MIB);
    let mut heap = Heap::new(driver.clone(), Config::lean()).expect("a heap");
    let at = heap.malloc(100 * MIB, Stream(0), Tag::default()).expect("memory");
    driver.set_memory(100 * MIB);
    assert!(matches!(heap.malloc(50 * MIB, Stream(0), Tag::default()), Err(HeapError::OutOfMemory { .. })));
    heap.free(at).expect("a live block");
    // What is there is moved to where it is needed: nothing is made.
    let before = driver.created();
    let other = heap.malloc(90 * MIB, Stream(1), Tag::default()).expect("moved memory");
    heap.check().expect("a sound heap");
    assert_eq!(driver.created(), before);
    heap.free(other).expect("a live block");
}
