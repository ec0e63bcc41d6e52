//! The rules that both soft devices keep, and what only real memory can show: content that moves, fork.

use super::*;

const PAGE: u64 = 2 << 20;

fn fill(at: Address, byte: u8) {
    // SAFETY: the test has mapped PAGE bytes at `at` on a host driver.
    unsafe { std::ptr::write_bytes(at as *mut u8, byte, PAGE as usize) };
}

fn peek(at: Address) -> u8 {
    // SAFETY: the test has mapped memory at `at` on a host driver.
    unsafe { std::ptr::read_volatile(at as *const u8) }
}

#[test]
fn content_moves_with_the_handle() {
    let driver = HostDriver::with_memory(64 * PAGE);
    let base = driver.reserve(16 * PAGE).unwrap();
    let handle = driver.create(PAGE).unwrap();
    driver.map(base, PAGE, handle).unwrap();
    fill(base, 7);
    driver.unmap(base, PAGE).unwrap();
    driver.map(base + 5 * PAGE, PAGE, handle).unwrap();
    assert_eq!(peek(base + 5 * PAGE + 12345), 7);
    let fresh = driver.create(PAGE).unwrap();
    driver.map(base, PAGE, fresh).unwrap();
    assert_eq!(peek(base + 12345), 0, "fresh memory is zeroed");
    driver.unmap(base, PAGE).unwrap();
    driver.unmap(base + 5 * PAGE, PAGE).unwrap();
    driver.destroy(handle).unwrap();
    driver.destroy(fresh).unwrap();
    driver.unreserve(base, 16 * PAGE).unwrap();
    assert_eq!((driver.created(), driver.violations(), driver.reservations()), (0, 0, 0));
}

#[test]
fn rules_are_kept_by_both() {
    fn rules<M: Memory>() {
        let driver = SoftDriver::<M>::with_memory(4 * PAGE);
        let base = driver.reserve(8 * PAGE).unwrap();
        assert_eq!(base % PAGE, 0);
        let one = driver.create(PAGE).unwrap();
        let two = driver.create(2 * PAGE).unwrap();
        assert_eq!(driver.create(2 * PAGE), Err(DriverError::OutOfMemory));
        driver.map(base + PAGE, 2 * PAGE, two).unwrap();
        assert!(driver.map(base + 2 * PAGE, PAGE, one).is_err(), "over a mapping");
        assert!(driver.map(base + 8 * PAGE, PAGE, one).is_err(), "outside the reservation");
        assert!(driver.map(base, 2 * PAGE, one).is_err(), "not the handle's size");
        assert!(driver.unmap(base + PAGE, PAGE).is_err(), "half a handle");
        assert!(driver.destroy(two).is_err(), "still mapped");
        assert!(driver.unreserve(base, 8 * PAGE).is_err(), "still mapped");
        assert!(driver.create(1).is_err(), "not whole");
        assert_eq!(driver.violations(), 7);
        assert!(driver.is_mapped(base + PAGE) && !driver.is_mapped(base));
        driver.unmap(base + PAGE, 2 * PAGE).unwrap();
        driver.destroy(two).unwrap();
        driver.destroy(one).unwrap();
        driver.unreserve(base, 8 * PAGE).unwrap();
        assert_eq!(driver.created(), 0);
    }
    rules::<Pages>();
    rules::<NoPages>();
}

#[test]
fn faults_strike_once_and_change_nothing() {
    let driver = BooksDriver::with_memory(8 * PAGE);
    driver.fail(Some(Call::Create), 2, DriverError::OutOfMemory);
    assert!(driver.create(PAGE).is_ok());
    assert_eq!(driver.create(PAGE), Err(DriverError::OutOfMemory));
    assert_eq!(driver.created(), PAGE);
    assert!(driver.create(PAGE).is_ok());
    assert_eq!(driver.calls().of(Call::Create), 3);
}

#[test]
fn events_wait_for_work_and_for_other_streams() {
    let driver = BooksDriver::default();
    let (a, b) = (Stream(1), Stream(2));
    let at_once = driver.record_event(a).unwrap();
    assert_eq!(driver.query_event(at_once), Ok(true));
    driver.submit(a);
    let after_work = driver.record_event(a).unwrap();
    assert_eq!(driver.query_event(after_work), Ok(false));
    driver.stream_wait_event(b, after_work).unwrap();
    driver.submit(b);
    let behind = driver.record_event(b).unwrap();
    assert_eq!(driver.complete(b, 1), 0, "b waits for a");
    assert_eq!(driver.complete(a, 1), 1);
    assert_eq!(driver.query_event(after_work), Ok(true));
    assert_eq!(driver.complete(b, 9), 1);
    assert_eq!(driver.query_event(behind), Ok(true));
    driver.submit(a);
    let last = driver.record_event(a).unwrap();
    driver.wait_event(last).unwrap();
    assert_eq!(driver.outstanding(a), 0);
}

#[test]
fn a_capture_forbids_events() {
    let driver = BooksDriver::default();
    driver.begin_capture(Stream(3));
    assert!(driver.record_event(Stream(3)).is_err());
    assert!(driver.synchronize_device().is_err());
    assert!(driver.record_event(Stream(4)).is_ok());
    assert_eq!(driver.violations(), 2);
    driver.end_capture(Stream(3));
    assert!(driver.record_event(Stream(3)).is_ok());
}

#[test]
fn many_handles_cost_few_kernel_areas() {
    // In a process of its own: what other tests map at the same time would be counted as well.
    let output = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "driver::host::tests::areas_of_many_handles", "--ignored", "--test-threads=1"])
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.contains("1 passed"), "{text}");
}

#[test]
#[ignore = "run by many_handles_cost_few_kernel_areas"]
fn areas_of_many_handles() {
    fn areas() -> usize {
        std::fs::read_to_string("/proc/self/maps").unwrap().lines().count()
    }
    let driver = HostDriver::with_memory(4096 * PAGE);
    let base = driver.reserve(4096 * PAGE).unwrap();
    let before = areas();
    let handles: Vec<Handle> = (0..1000).map(|_| driver.create(PAGE).unwrap()).collect();
    for (i, &handle) in handles.iter().enumerate() {
        driver.map(base + i as u64 * PAGE, PAGE, handle).unwrap();
    }
    assert!(areas() < before + 50, "{} areas for 1000 handles", areas() - before);
}

#[test]
fn a_forked_child_sees_a_copy() {
    let driver = HostDriver::with_memory(64 * PAGE);
    let base = driver.reserve(4 * PAGE).unwrap();
    let handle = driver.create(PAGE).unwrap();
    driver.map(base, PAGE, handle).unwrap();
    fill(base, 1);
    // A moved handle must stay private too.
    driver.unmap(base, PAGE).unwrap();
    driver.map(base + PAGE, PAGE, handle).unwrap();
    // SAFETY: the child touches only the mapped page and leaves by _exit, which runs nothing of ours.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let seen = peek(base + PAGE);
        fill(base + PAGE, 2);
        // SAFETY: ends the child without unwinding into the test harness.
        unsafe { libc::_exit(if seen == 1 { 0 } else { 1 }) };
    }
    let mut status = 0;
    // SAFETY: `child` is our own child; status is a valid place for its result.
    unsafe { libc::waitpid(child, &mut status, 0) };
    assert_eq!(status, 0, "the child sees the content");
    assert_eq!(peek(base + PAGE), 1, "the child's writes stay its own");
}

/// `cargo test --release --lib first_touch -- --ignored --nocapture` prints what fresh memory costs.
#[test]
#[ignore = "a measurement"]
fn first_touch() {
    for huge_pages in [false, true, false, true] {
        let driver = HostDriver::new(Options { huge_pages, ..Options::default() });
        let base = driver.reserve(256 * PAGE).unwrap();
        let start = std::time::Instant::now();
        for i in 0..256 {
            let handle = driver.create(PAGE).unwrap();
            driver.map(base + i * PAGE, PAGE, handle).unwrap();
            fill(base + i * PAGE, 1);
        }
        let fresh = start.elapsed();
        let start = std::time::Instant::now();
        (0..256).for_each(|i| fill(base + i * PAGE, 2));
        println!("huge pages {huge_pages}: 512 MiB fresh {fresh:?}, again {:?}", start.elapsed());
    }
}

/// Two streams that wait for each other in turn, the one behind a third: no wait is passed twice.
#[test]
fn waits_that_lead_back_to_their_stream_are_passed_once() {
    let driver = BooksDriver::default();
    let (a, b, c) = (Stream(1), Stream(2), Stream(3));
    let wait_for = |waiting: Stream, other: Stream| {
        let event = driver.record_event(other).unwrap();
        driver.stream_wait_event(waiting, event).unwrap();
        driver.release_event(event).unwrap();
    };
    driver.submit(b);
    wait_for(c, b);
    wait_for(a, c);
    driver.submit(a);
    wait_for(c, a);
    assert_eq!(driver.complete(b, 1), 1);
    let behind = driver.record_event(a).unwrap();
    assert!(!driver.query_event(behind).unwrap(), "a's own work is not done");
    assert_eq!((driver.outstanding(a), driver.complete(a, 9), driver.outstanding(a)), (1, 1, 0));
    assert!(driver.query_event(behind).unwrap());
}
