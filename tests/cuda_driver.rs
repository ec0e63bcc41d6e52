//! The CUDA driver against a stand-in for `libcuda.so.1` (tests/fake_cuda/libcuda.c).
//!
//! The table of symbols is made once per process, so each variant of the library gets a process of its
//! own: a parent test starts this same binary with `STRANDLINE_LIBCUDA` and runs one ignored child test.

use std::ffi::{CString, c_char, c_int, c_long, c_uint, c_void};
use std::path::PathBuf;
use std::process::Command;
use std::sync::OnceLock;

use strandline::driver::cuda::CudaDriver;
use strandline::driver::{Address, Driver, DriverError, Handle, Result, Stream};

const PAGE: u64 = 2 << 20;

// ---- parents -------------------------------------------------------------------------------------------

/// Compiles the stand-in; `flags` choose the variant. Returns its path.
fn library(variant: &str, flags: &[&str]) -> PathBuf {
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("{variant}-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a folder for the stand-in");
    let path = folder.join("libcuda.so.1");
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fake_cuda/libcuda.c");
    let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".into());
    let status = Command::new(compiler)
        .args(["-Wall", "-Wextra", "-Werror", "-O1", "-shared", "-fPIC", "-o"])
        .arg(&path)
        .args(flags)
        .arg(source)
        .status()
        .expect("a C compiler");
    assert!(status.success(), "the stand-in does not compile");
    path
}

/// Runs one child test in a process of its own.
fn child(test: &str, library: &std::path::Path, settings: &[(&str, &str)]) {
    let output = Command::new(std::env::current_exe().expect("this binary"))
        .args(["--exact", test, "--ignored", "--nocapture", "--test-threads=1"])
        .env("STRANDLINE_LIBCUDA", library)
        .env("FAKE_CUDA_VERBOSE", "1")
        .envs(settings.iter().copied())
        .output()
        .expect("the child starts");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success() && text.contains("1 passed"),
        "{test}:\n{text}\n{}",
        String::from_utf8_lossy(&output.stderr)
    );
}

#[test]
fn a_modern_driver() {
    let library = library("modern", &[]);
    for test in ["child_life", "child_faults", "child_events", "child_capture", "child_exit", "child_sharing"]
    {
        child(test, &library, &[]);
    }
    child("child_out_of_memory", &library, &[("FAKE_CUDA_MEMORY", "8388608")]);
    child("child_peers", &library, &[("FAKE_CUDA_DEVICES", "3")]);
    child("child_no_peers", &library, &[("FAKE_CUDA_DEVICES", "2"), ("FAKE_CUDA_NO_PEERS", "1")]);
    child("child_unexportable", &library, &[("FAKE_CUDA_NO_FD", "1")]);
    child("child_plain", &library, &[("FAKE_CUDA_NO_VMM", "1")]);
}

#[test]
fn an_old_driver_without_virtual_memory() {
    child("child_plain", &library("old", &["-DOLD_DRIVER"]), &[]);
}

#[test]
fn no_driver_at_all() {
    child("child_absent", &PathBuf::from("/nonexistent/libcuda.so.1"), &[]);
}

#[test]
fn a_library_that_is_no_driver() {
    child("child_absent", &PathBuf::from("libc.so.6"), &[]);
}

#[test]
fn opening_fails_cleanly_at_every_call() {
    let library = library("opening", &[]);
    for (function, code) in
        [("cuInit", "100"), ("cuDeviceGet", "101"), ("cuDevicePrimaryCtxRetain", "46"), ("cuInit", "12345")]
    {
        child("child_refused", &library, &[("FAKE_CUDA_FAULT", &format!("{function}:0:{code}"))]);
    }
    child("child_refused", &library, &[("FAKE_CUDA_FAULT", "cuMemGetAllocationGranularity:0:1")]);
}

// ---- what a child asks the stand-in --------------------------------------------------------------------

struct Fake {
    handle: *mut c_void,
}

// SAFETY: a dlopen handle may be used on every thread.
unsafe impl Send for Fake {}
// SAFETY: as above.
unsafe impl Sync for Fake {}

fn fake() -> &'static Fake {
    static FAKE: OnceLock<Fake> = OnceLock::new();
    FAKE.get_or_init(|| {
        let path = CString::new(std::env::var("STRANDLINE_LIBCUDA").expect("set by the parent")).unwrap();
        // SAFETY: opens the stand-in, the same copy that the driver under test uses.
        let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW) };
        assert!(!handle.is_null());
        Fake { handle }
    })
}

impl Fake {
    fn find(&self, name: &str) -> *mut c_void {
        let name = CString::new(name).unwrap();
        // SAFETY: the handle is open.
        let found = unsafe { libc::dlsym(self.handle, name.as_ptr()) };
        assert!(!found.is_null(), "{name:?} is missing");
        found
    }
    fn live(&self, what: &str) -> i64 {
        // SAFETY: the stand-in's own declaration.
        let ask: extern "C" fn(*const c_char) -> c_long =
            unsafe { std::mem::transmute(self.find("fake_cuda_live")) };
        ask(CString::new(what).unwrap().as_ptr())
    }
    fn calls(&self, function: &str) -> i32 {
        // SAFETY: the stand-in's own declaration.
        let ask: extern "C" fn(*const c_char) -> c_int =
            unsafe { std::mem::transmute(self.find("fake_cuda_calls")) };
        ask(CString::new(function).unwrap().as_ptr())
    }
    fn fault(&self, function: &'static str, k: i32, code: i32) {
        // SAFETY: the stand-in's own declaration; it copies the name.
        let tell: extern "C" fn(*const c_char, c_int, c_int) =
            unsafe { std::mem::transmute(self.find("fake_cuda_fault")) };
        tell(CString::new(function).unwrap().as_ptr(), k, code);
    }
    fn on_stream(&self, what: &str, stream: Stream) {
        // SAFETY: the stand-in's own declaration.
        let tell: extern "C" fn(u64) = unsafe { std::mem::transmute(self.find(what)) };
        tell(stream.0);
    }
    fn capture(&self, stream: Stream, on: bool) {
        // SAFETY: the stand-in's own declaration.
        let tell: extern "C" fn(u64, c_int) = unsafe { std::mem::transmute(self.find("fake_cuda_capture")) };
        tell(stream.0, c_int::from(on));
    }
    fn access(&self, at: Address) -> u32 {
        // SAFETY: the stand-in's own declaration.
        let ask: extern "C" fn(u64) -> c_uint = unsafe { std::mem::transmute(self.find("fake_cuda_access")) };
        ask(at)
    }
    fn number(&self, what: &str) -> i32 {
        // SAFETY: the stand-in's own declaration.
        let ask: extern "C" fn() -> c_int = unsafe { std::mem::transmute(self.find(what)) };
        ask()
    }
    /// Nothing is left, nothing was misused, and this thread is as it was.
    fn assert_clean(&self, when: &str) {
        for what in ["ranges", "handles", "mappings", "plain", "bytes"] {
            assert_eq!(self.live(what), 0, "{what} left {when}");
        }
        self.assert_calm(when);
    }
    fn assert_calm(&self, when: &str) {
        assert_eq!(self.number("fake_cuda_misuses"), 0, "misuse {when}");
        assert_eq!(self.number("fake_cuda_context_depth"), 0, "a context left current {when}");
        assert_eq!(self.number("fake_cuda_capture_mode"), 0, "the capture mode changed {when}");
    }
}

fn open() -> CudaDriver {
    CudaDriver::new(0).expect("the stand-in has a device")
}

/// Everything a heap does with pages, undone whatever fails; a failed release is tried once more.
fn life(driver: &CudaDriver) -> Result<()> {
    let at = driver.reserve(16 * PAGE)?;
    let mut pages: Vec<(Address, Handle, bool)> = Vec::new();
    let mut outcome = Ok(());
    for i in 0..3 {
        match driver.create(2 * PAGE) {
            Ok(handle) => {
                let place = at + i * 2 * PAGE;
                let mapped = driver.map(place, 2 * PAGE, handle);
                pages.push((place, handle, mapped.is_ok()));
                outcome = outcome.and(mapped);
            }
            Err(error) => outcome = outcome.and(Err(error)),
        }
    }
    let moved = pages.first().copied();
    if let Some((place, handle, true)) = moved {
        let unmapped = driver.unmap(place, 2 * PAGE);
        if unmapped.is_err() {
            driver.unmap(place, 2 * PAGE).expect("the second release succeeds");
        }
        let there = at + 12 * PAGE;
        let mapped = driver.map(there, 2 * PAGE, handle);
        pages[0] = (there, handle, mapped.is_ok());
        outcome = outcome.and(unmapped).and(mapped);
    }
    let streams = driver.record_event(Stream(7)).and_then(|event| {
        let done = driver.query_event(event).and_then(|_| driver.stream_wait_event(Stream(8), event));
        done.and(driver.wait_event(event)).and(driver.release_event(event))
    });
    outcome = outcome.and(streams).and(driver.synchronize_stream(Stream(7))).and(driver.synchronize_device());
    outcome = outcome.and(driver.is_capturing(Stream(0)).map(|_| ())).and(driver.memory_info().map(|_| ()));
    let mut give_back = |release: &dyn Fn() -> Result<()>| {
        if let Err(error) = release() {
            release().expect("the second release succeeds");
            outcome = outcome.clone().and(Err(error));
        }
    };
    for (place, handle, mapped) in pages {
        if mapped {
            give_back(&|| driver.unmap(place, 2 * PAGE));
        }
        give_back(&|| driver.destroy(handle));
    }
    give_back(&|| driver.unreserve(at, 16 * PAGE));
    outcome
}

// ---- children ------------------------------------------------------------------------------------------

#[test]
#[ignore = "run by its parent"]
fn child_life() {
    assert_eq!(CudaDriver::device_count(), Ok(1));
    let driver = open();
    assert!(driver.has_virtual_memory());
    assert_eq!(driver.granularity(), PAGE);
    let info = driver.memory_info().unwrap();
    assert_eq!((info.free, info.total), (1 << 30, 1 << 30));
    life(&driver).unwrap();
    fake().assert_clean("after a life");
    // From another thread, which has no context.
    std::thread::scope(|scope| scope.spawn(|| life(&driver)).join().unwrap()).unwrap();
    fake().assert_clean("after a life on another thread");
    assert!(matches!(CudaDriver::new(1), Err(DriverError::Failed { call: "cuDeviceGet", code: 101 })));
    assert_eq!(
        CudaDriver::describe(&DriverError::Failed { call: "cuMemMap", code: 1 }),
        "cuMemMap failed with code 1 (CUDA_ERROR_INVALID_VALUE)"
    );
}

#[test]
#[ignore = "run by its parent"]
fn child_faults() {
    let driver = open();
    let mut faults = 0;
    for function in [
        "cuCtxGetCurrent",
        "cuCtxPushCurrent_v2",
        "cuMemAddressReserve",
        "cuMemAddressFree",
        "cuMemCreate",
        "cuMemRelease",
        "cuMemMap",
        "cuMemUnmap",
        "cuMemSetAccess",
        "cuEventCreate",
        "cuEventRecord",
        "cuEventQuery",
        "cuEventSynchronize",
        "cuStreamWaitEvent",
        "cuStreamSynchronize",
        "cuCtxSynchronize",
        "cuStreamIsCapturing",
        "cuMemGetInfo_v2",
        "cuThreadExchangeStreamCaptureMode",
    ] {
        let before = fake().calls(function);
        life(&driver).unwrap();
        let calls = fake().calls(function) - before;
        for k in 1..=calls {
            // Failures of the device, lack of memory, and a code that no binding knows.
            for code in [2, 700, 719, 98_765] {
                fake().fault(function, k, code);
                let outcome = life(&driver);
                // Creating an event fails once only (they are pooled); the capture mode is a wish.
                if !matches!(function, "cuThreadExchangeStreamCaptureMode") {
                    let error = outcome.expect_err(&format!("call {k} of {function} failed with {code}"));
                    let expected = match code {
                        2 => matches!(error, DriverError::OutOfMemory),
                        _ => matches!(error, DriverError::Failed { code: c, .. } if c == code),
                    };
                    assert!(expected, "call {k} of {function}, code {code}: {error:?}");
                }
                fake().fault(function, -1, 0);
                if function == "cuThreadExchangeStreamCaptureMode" {
                    // A failed exchange back leaves the mode relaxed; nothing else can be done about it.
                    continue;
                }
                fake().assert_clean(&format!("after call {k} of {function} failed with {code}"));
                faults += 1;
            }
        }
    }
    assert!(faults > 200, "only {faults} faults were tried");
}

#[test]
#[ignore = "run by its parent"]
fn child_events() {
    let driver = open();
    let stream = Stream(11);
    let idle = driver.record_event(stream).unwrap();
    assert_eq!(driver.query_event(idle), Ok(true));
    fake().on_stream("fake_cuda_queue", stream);
    let event = driver.record_event(stream).unwrap();
    assert_eq!(driver.query_event(event), Ok(false));
    assert_eq!(driver.query_event(idle), Ok(true));
    fake().on_stream("fake_cuda_complete", stream);
    assert_eq!(driver.query_event(event), Ok(true));
    fake().on_stream("fake_cuda_queue", stream);
    driver.release_event(idle).unwrap();
    let again = driver.record_event(stream).unwrap();
    assert_eq!(again, idle, "spare events are lent again");
    assert_eq!(driver.query_event(again), Ok(false));
    driver.wait_event(again).unwrap();
    assert_eq!(driver.query_event(again), Ok(true));
    assert_eq!(fake().live("events"), 2);
    fake().assert_clean("after events");
}

#[test]
#[ignore = "run by its parent"]
fn child_capture() {
    let driver = open();
    let stream = Stream(5);
    let event = driver.record_event(stream).unwrap();
    assert_eq!(driver.is_capturing(stream), Ok(false));
    fake().capture(stream, true);
    assert_eq!(driver.is_capturing(stream), Ok(true));
    assert_eq!(driver.is_capturing(Stream(6)), Ok(false));
    // None of these may invalidate the capture.
    life_of_pages(&driver);
    driver.query_event(event).unwrap();
    driver.memory_info().unwrap();
    fake().capture(stream, false);
    fake().fault("cuStreamIsCapturing", 1, 906);
    assert_eq!(driver.is_capturing(Stream(0)), Ok(true), "the legacy stream is not to be touched");
    fake().assert_clean("after a capture");
}

fn life_of_pages(driver: &CudaDriver) {
    let at = driver.reserve(4 * PAGE).unwrap();
    let handle = driver.create(PAGE).unwrap();
    driver.map(at, PAGE, handle).unwrap();
    assert_ne!(fake().access(at), 0);
    driver.unmap(at, PAGE).unwrap();
    driver.destroy(handle).unwrap();
    driver.unreserve(at, 4 * PAGE).unwrap();
    let plain = driver.allocate(100).unwrap();
    driver.deallocate(plain, 100).unwrap();
}

#[test]
#[ignore = "run by its parent"]
fn child_exit() {
    let driver = open();
    let at = driver.reserve(4 * PAGE).unwrap();
    let handle = driver.create(PAGE).unwrap();
    driver.map(at, PAGE, handle).unwrap();
    let event = driver.record_event(Stream(3)).unwrap();
    let plain = driver.allocate(PAGE).unwrap();
    fake().number("fake_cuda_shut_down");
    assert_eq!(driver.query_event(event), Ok(true));
    assert_eq!(driver.wait_event(event), Ok(()));
    assert_eq!(driver.release_event(event), Ok(()));
    assert_eq!(driver.synchronize_stream(Stream(3)), Ok(()));
    assert_eq!(driver.synchronize_device(), Ok(()));
    assert_eq!(driver.unmap(at, PAGE), Ok(()));
    assert_eq!(driver.destroy(handle), Ok(()));
    assert_eq!(driver.unreserve(at, 4 * PAGE), Ok(()));
    assert_eq!(driver.deallocate(plain, PAGE), Ok(()));
    // What is asked for, on the other hand, is refused.
    assert!(matches!(driver.create(PAGE), Err(DriverError::Failed { code: 4, .. })));
    fake().assert_calm("after the driver shut down");
}

#[test]
#[ignore = "run by its parent"]
fn child_out_of_memory() {
    let driver = open();
    let handles: Vec<Handle> = (0..4).map(|_| driver.create(PAGE).unwrap()).collect();
    assert_eq!(driver.create(PAGE), Err(DriverError::OutOfMemory));
    assert_eq!(driver.allocate(1), Err(DriverError::OutOfMemory));
    driver.destroy(handles[0]).unwrap();
    let last = driver.create(PAGE).unwrap();
    for handle in handles[1..].iter().chain([&last]) {
        driver.destroy(*handle).unwrap();
    }
    fake().assert_clean("after out of memory");
}

#[test]
#[ignore = "run by its parent"]
fn child_peers() {
    let first = open();
    let at = first.reserve(8 * PAGE).unwrap();
    let map = |place| {
        let handle = first.create(PAGE).unwrap();
        first.map(place, PAGE, handle).unwrap();
    };
    map(at);
    assert_eq!(fake().access(at), 0b001, "a process of one device pays for one");
    let second = CudaDriver::new(1).unwrap();
    assert_eq!(fake().access(at), 0b011, "old mappings are opened to a new device");
    map(at + PAGE);
    assert_eq!(fake().access(at + PAGE), 0b011);
    let there = second.reserve(PAGE).unwrap();
    let handle = second.create(PAGE).unwrap();
    second.map(there, PAGE, handle).unwrap();
    assert_eq!(fake().access(there), 0b011);
    first.enable_peer(2).unwrap();
    first.enable_peer(2).unwrap();
    first.enable_peer(0).unwrap();
    assert_eq!(fake().access(at), 0b111);
    assert_eq!(fake().access(there), 0b011);
    first.copy_between(at, there, 1, 100, Stream(0)).unwrap();
    assert_eq!(second.ordinal(), 1);
    fake().assert_calm("with peers");
}

#[test]
#[ignore = "run by its parent"]
fn child_no_peers() {
    let first = open();
    let at = first.reserve(PAGE).unwrap();
    let handle = first.create(PAGE).unwrap();
    first.map(at, PAGE, handle).unwrap();
    let _second = CudaDriver::new(1).unwrap();
    assert_eq!(fake().access(at), 0b001);
    fake().assert_calm("without peers");
}

#[test]
#[ignore = "run by its parent"]
fn child_unexportable() {
    let driver = open();
    life(&driver).unwrap();
    fake().assert_clean("after a life without exportable handles");
    let at = driver.reserve(PAGE).unwrap();
    let handle = driver.create(PAGE).unwrap();
    driver.map(at, PAGE, handle).unwrap();
    assert!(driver.export(at, PAGE).is_err());
}

#[test]
#[ignore = "run by its parent"]
fn child_sharing() {
    let driver = open();
    let at = driver.reserve(8 * PAGE).unwrap();
    let handles: Vec<Handle> = (1..=2).map(|pages| driver.create(pages * PAGE).unwrap()).collect();
    driver.map(at, PAGE, handles[0]).unwrap();
    driver.map(at + PAGE, 2 * PAGE, handles[1]).unwrap();
    let exported = driver.export(at + 512, PAGE).unwrap();
    assert_eq!(exported.offset, 512);
    assert_eq!(exported.pieces.iter().map(|piece| piece.1).collect::<Vec<_>>(), [PAGE, 2 * PAGE]);
    assert_eq!(driver.export(at + 512, PAGE).unwrap(), exported, "descriptors are made once");
    assert_eq!(driver.export(at, PAGE).unwrap().pieces.len(), 1);
    assert!(driver.export(at, 4 * PAGE).is_err(), "nothing is mapped behind the second piece");
    assert!(driver.export(at - PAGE, PAGE).is_err());
    let imported = driver.import(&exported.pieces).unwrap();
    assert_eq!(imported.size, 3 * PAGE);
    assert_ne!(fake().access(imported.at + 2 * PAGE), 0);
    driver.forget(imported).unwrap();
    assert!(driver.import(&[(-1, PAGE)]).is_err());
    driver.unmap(at, PAGE).unwrap();
    driver.unmap(at + PAGE, 2 * PAGE).unwrap();
    for (file, _) in exported.pieces {
        // SAFETY: asks about a descriptor number.
        let open = unsafe { libc::fcntl(file, libc::F_GETFD) } != -1;
        assert!(!open, "descriptors are closed with the mapping");
    }
    for handle in handles {
        driver.destroy(handle).unwrap();
    }
    driver.unreserve(at, 8 * PAGE).unwrap();
    fake().assert_clean("after sharing");
}

#[test]
#[ignore = "run by its parent"]
fn child_plain() {
    let driver = open();
    assert!(!driver.has_virtual_memory());
    assert!(matches!(driver.reserve(PAGE), Err(DriverError::Unsupported(_))));
    assert!(matches!(driver.create(PAGE), Err(DriverError::Unsupported(_))));
    let at = driver.allocate(3 * PAGE).unwrap();
    assert_eq!(driver.memory_info().unwrap().free, (1 << 30) - 3 * PAGE);
    let event = driver.record_event(Stream(2)).unwrap();
    assert_eq!(driver.query_event(event), Ok(true));
    driver.deallocate(at, 3 * PAGE).unwrap();
    fake().assert_clean("after plain segments");
}

#[test]
#[ignore = "run by its parent"]
fn child_absent() {
    assert!(matches!(CudaDriver::device_count(), Err(DriverError::Unsupported(_))));
    assert!(matches!(CudaDriver::new(0), Err(DriverError::Unsupported(_))));
    // The answer is the same at every later call.
    assert!(matches!(CudaDriver::new(0), Err(DriverError::Unsupported(_))));
}

#[test]
#[ignore = "run by its parent"]
fn child_refused() {
    assert!(CudaDriver::new(0).is_err());
    fake().assert_calm("after a refusal");
}
