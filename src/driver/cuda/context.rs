//! A device's primary context, and being in it for the length of a call.
//!
//! Must not know: memory, events, the heap. The primary context is the one that torch (cudart) uses; it is
//! retained once per device and never released, because frees may still arrive while the process exits.
//! Invariant: after a call the thread's current context is the one that it was before; a thread that had
//! none has none again.

use cudarc::driver::sys;

use super::symbols::{Symbols, code};
use crate::driver::{DriverError, Result};

/// What the driver's `CU_STREAM_CAPTURE_MODE_RELAXED` is.
const CAPTURE_MODE_RELAXED: u32 = 2;

/// The primary context of one device.
pub struct Context {
    symbols: &'static Symbols,
    raw: sys::CUcontext,
    device: sys::CUdevice,
}

// SAFETY: a CUcontext is a name that the driver accepts on every thread.
unsafe impl Send for Context {}
// SAFETY: as above; the struct is never changed after it was made.
unsafe impl Sync for Context {}

impl Context {
    /// Initialises the driver and retains the primary context of the device with this ordinal.
    pub fn retain(symbols: &'static Symbols, ordinal: i32) -> Result<Context> {
        let mut device: sys::CUdevice = 0;
        let mut raw: sys::CUcontext = std::ptr::null_mut();
        // SAFETY: cuInit may be called any number of times, with flags 0.
        check("cuInit", unsafe { (symbols.init)(0) })?;
        // SAFETY: `device` is a place for one CUdevice.
        check("cuDeviceGet", unsafe { (symbols.device_get)(&mut device, ordinal) })?;
        // SAFETY: `raw` is a place for one CUcontext; `device` came from the driver.
        check("cuDevicePrimaryCtxRetain", unsafe { (symbols.primary_context_retain)(&mut raw, device) })?;
        Ok(Context { symbols, raw, device })
    }

    /// The driver's name of the device.
    pub fn device(&self) -> sys::CUdevice {
        self.device
    }

    /// The driver's name of the context.
    pub fn raw(&self) -> sys::CUcontext {
        self.raw
    }

    /// Whether the calling thread is in this context.
    pub fn is_current(&self) -> bool {
        let mut current: sys::CUcontext = std::ptr::null_mut();
        // SAFETY: `current` is a place for one CUcontext.
        let result = unsafe { (self.symbols.context_current)(&mut current) };
        result == code::SUCCESS && current == self.raw
    }

    /// Makes this context current for as long as the guard lives.
    pub fn enter(&self) -> Result<Entered> {
        let mut current: sys::CUcontext = std::ptr::null_mut();
        // SAFETY: `current` is a place for one CUcontext.
        check("cuCtxGetCurrent", unsafe { (self.symbols.context_current)(&mut current) })?;
        if current == self.raw {
            return Ok(self.entered(false));
        }
        // SAFETY: `raw` is the retained primary context.
        check("cuCtxPushCurrent", unsafe { (self.symbols.context_push)(self.raw) })?;
        Ok(self.entered(true))
    }

    fn entered(&self, pushed: bool) -> Entered {
        Entered { symbols: self.symbols, pushed, _this_thread: std::marker::PhantomData }
    }
}

/// Proof that the context is current on this thread.
pub struct Entered {
    symbols: &'static Symbols,
    pushed: bool,
    /// A context is current on one thread: the guard must be dropped on the thread that made it.
    _this_thread: std::marker::PhantomData<*const ()>,
}

impl Drop for Entered {
    fn drop(&mut self) {
        if self.pushed {
            let mut old: sys::CUcontext = std::ptr::null_mut();
            // SAFETY: undoes the push of `enter` on the same thread (the guard is not Send).
            unsafe { (self.symbols.context_pop)(&mut old) };
        }
    }
}

/// Lets this thread call what a capture elsewhere would forbid (cudaMalloc, event queries) for as long as
/// it lives: without it, one allocation during `torch.cuda.graph` invalidates the capture.
pub struct Relaxed {
    exchange: Option<unsafe extern "C" fn(*mut u32) -> i32>,
    before: u32,
}

impl Relaxed {
    pub fn enter(symbols: &Symbols) -> Relaxed {
        let mut mode = CAPTURE_MODE_RELAXED;
        let exchange = symbols.exchange_capture_mode.filter(|exchange| {
            // SAFETY: swaps the thread's mode with `mode`.
            (unsafe { exchange(&mut mode) }) == code::SUCCESS
        });
        Relaxed { exchange, before: mode }
    }
}

impl Drop for Relaxed {
    fn drop(&mut self) {
        if let Some(exchange) = self.exchange {
            // SAFETY: puts the mode back that `enter` took away.
            unsafe { exchange(&mut self.before) };
        }
    }
}

/// Turns a result code into a `Result`.
pub fn check(call: &'static str, result: i32) -> Result<()> {
    match result {
        code::SUCCESS => Ok(()),
        code::OUT_OF_MEMORY => Err(DriverError::OutOfMemory),
        code::NOT_SUPPORTED => Err(DriverError::Unsupported(call)),
        other => Err(DriverError::Failed { call, code: other }),
    }
}

/// As [`check`], for calls that give something back: once the driver or the context is gone (process exit),
/// everything has been given back.
pub fn check_release(call: &'static str, result: i32) -> Result<()> {
    match result {
        code::DEINITIALIZED | code::CONTEXT_IS_DESTROYED => Ok(()),
        other => check(call, other),
    }
}

/// Whether an error says that the driver or the context is gone.
pub fn is_gone(error: &DriverError) -> bool {
    matches!(error, DriverError::Failed { code: code::DEINITIALIZED | code::CONTEXT_IS_DESTROYED, .. })
}
