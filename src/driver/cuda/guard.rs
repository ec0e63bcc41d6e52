//! The device kernels of guard mode (`cuda/guard.cu`): loaded, launched, and what they found.
//!
//! The kernels come as PTX inside the library; the driver compiles them when a device is first guarded. They tell
//! what they find by writing to host memory that the device can reach, and only where something is wrong, so a
//! launch without a finding costs nothing but the launch. Must not know: blocks, stacks, what a pattern means.
//! Invariants: nothing waits for the device; the functions' parameters are those of guard.cu; `Slots` is never
//! given back, because a kernel may still write to it.

use std::ffi::{CStr, CString, c_void};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::context::{Relaxed, check};
use super::{CudaDriver, Shared, raw_stream};
use crate::driver::{Address, DriverError, Result, Stream};

/// The kernels as the driver takes them.
const PTX: &str = include_str!("../../../cuda/guard.ptx");
/// `CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP`.
const PORTABLE_AND_MAPPED: u32 = 3;
/// Threads of a group, and most groups of a launch: enough to fill a large GPU, few enough to start quickly.
const GROUP: u64 = 256;
const GROUPS: u64 = 512;
/// Bytes that one thread takes at a time.
const STRIDE: u64 = 16;

/// What one launch found about one range: `count` bytes are wrong, the first of them at the offset `first`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Found {
    pub first: u64,
    pub count: u64,
}

/// What one launch found: before the block, behind it, in it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Findings {
    pub front: Found,
    pub rear: Found,
    pub body: Found,
}

/// `struct slot` of guard.cu.
#[repr(C)]
struct Slot {
    words: [AtomicU64; 6],
}

/// Where launches leave what they found.
struct Slots {
    host: *const Slot,
    device: u64,
    count: u32,
}

// SAFETY: the memory is pinned, lives as long as the process, and is touched through atomics only.
unsafe impl Send for Slots {}
// SAFETY: as above.
unsafe impl Sync for Slots {}

/// A block and what surrounds it, as the kernels take it.
#[derive(Clone, Copy, Debug)]
pub struct Edges {
    pub at: Address,
    pub size: u64,
    pub front: u64,
    pub rear: u64,
    /// The byte of the pattern.
    pub pattern: u8,
}

/// The kernels on one device.
pub struct GuardKernels {
    shared: Arc<Shared>,
    arm: u64,
    retire: u64,
    look: u64,
    slots: Slots,
}

impl GuardKernels {
    /// Loads the kernels, with room for what `slots` launches find.
    ///
    /// # Errors
    /// A function that the driver lacks, or what it answered.
    pub fn load(driver: &CudaDriver, slots: u32) -> Result<GuardKernels> {
        let shared = &driver.shared;
        let symbols = shared.symbols;
        let load = symbols.module_load_data.ok_or(DriverError::Unsupported("cuModuleLoadData"))?;
        let function = symbols.module_get_function.ok_or(DriverError::Unsupported("cuModuleGetFunction"))?;
        symbols.launch_kernel.ok_or(DriverError::Unsupported("cuLaunchKernel"))?;
        let text = CString::new(PTX).map_err(|_| DriverError::Unsupported("the text of guard.ptx"))?;
        let _entered = shared.context.enter()?;
        let _relaxed = Relaxed::enter(symbols);
        let mut module = std::ptr::null_mut();
        // SAFETY: `module` is a place for one CUmodule; `text` is terminated, as a PTX image has to be.
        check("cuModuleLoadData", unsafe { load(&mut module, text.as_ptr().cast()) })?;
        let named = |name: &CStr| {
            let mut found = std::ptr::null_mut();
            // SAFETY: `found` is a place for one CUfunction; the module is loaded and never unloaded.
            check("cuModuleGetFunction", unsafe { function(&mut found, module, name.as_ptr()) })?;
            Ok(found as u64)
        };
        Ok(GuardKernels {
            arm: named(c"strandline_guard_arm")?,
            retire: named(c"strandline_guard_retire")?,
            look: named(c"strandline_guard_check")?,
            slots: Slots::new(shared, slots)?,
            shared: Arc::clone(shared),
        })
    }

    /// How many launches can leave what they found.
    pub fn slots(&self) -> u32 {
        self.slots.count
    }

    /// Whether any launch has found something since the alarm was taken.
    pub fn is_alarmed(&self) -> bool {
        self.slots.at(self.slots.count).words[0].load(Ordering::Relaxed) != 0
    }

    /// The same; the next finding raises it anew.
    pub fn take_alarm(&self) -> bool {
        self.slots.at(self.slots.count).words[0].swap(0, Ordering::Acquire) != 0
    }

    /// What a launch found; read it when its work is done.
    pub fn findings(&self, slot: u32) -> Findings {
        let word = |n: usize| self.slots.at(slot).words[n].load(Ordering::Acquire);
        let found = |n| Found { first: word(n), count: word(n + 1) };
        Findings { front: found(0), rear: found(2), body: found(4) }
    }

    /// Writes the pattern before and behind a block, in `stream`'s order.
    pub fn arm(&self, stream: Stream, edges: &Edges) -> Result<()> {
        let Edges { at, size, front, rear, pattern } = *edges;
        self.launch(self.arm, front.max(rear), stream, [at, size, front, rear, word(pattern)])
    }

    /// Looks at the pattern, then fills the block's first `poisoned` bytes with the byte `poison`.
    pub fn retire(&self, stream: Stream, edges: &Edges, poisoned: u64, poison: u8, slot: u32) -> Result<()> {
        let Edges { at, size, front, rear, pattern } = *edges;
        let (found, alarm) = self.slots.lend(slot);
        let arguments = [at, size, front, rear, word(pattern), poisoned, word(poison), found, alarm];
        self.launch(self.retire, front.max(rear).max(poisoned), stream, arguments)
    }

    /// Looks whether `size` bytes from `at` on are all the byte `poison`.
    pub fn look(&self, stream: Stream, at: Address, size: u64, poison: u8, slot: u32) -> Result<()> {
        let (found, alarm) = self.slots.lend(slot);
        self.launch(self.look, size, stream, [at, size, word(poison), found, alarm])
    }

    /// Launches a kernel of guard.cu, which all take 64-bit words only.
    fn launch<const N: usize>(
        &self,
        function: u64,
        bytes: u64,
        stream: Stream,
        mut words: [u64; N],
    ) -> Result<()> {
        let launch = self.shared.symbols.launch_kernel.ok_or(DriverError::Unsupported("cuLaunchKernel"))?;
        let groups = bytes.div_ceil(GROUP * STRIDE).clamp(1, GROUPS) as u32;
        let mut arguments = words.each_mut().map(|word| std::ptr::from_mut(word).cast::<c_void>());
        let _entered = self.shared.context.enter()?;
        // SAFETY: a function of the module that was loaded in this context; the callers above pass as many words
        // as its declaration in guard.cu has, the driver copies them during the call, and the stream is one of the
        // framework's in this context. The block is the heap's and handed out, its slot is `Slots`' memory.
        let result = unsafe {
            launch(
                function as _,
                groups,
                1,
                1,
                GROUP as u32,
                1,
                1,
                0,
                raw_stream(stream),
                arguments.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        };
        check("cuLaunchKernel", result)
    }
}

/// A byte, eight times over.
fn word(byte: u8) -> u64 {
    u64::from_ne_bytes([byte; 8])
}

impl Slots {
    /// Host memory for `count` slots and, behind them, the alarm.
    fn new(shared: &Shared, count: u32) -> Result<Slots> {
        let symbols = shared.symbols;
        let allocate = symbols.host_alloc.ok_or(DriverError::Unsupported("cuMemHostAlloc"))?;
        let address = symbols.host_address.ok_or(DriverError::Unsupported("cuMemHostGetDevicePointer"))?;
        let size = (count as usize + 1) * size_of::<Slot>();
        let mut host = std::ptr::null_mut();
        // SAFETY: `host` is a place for one pointer.
        check("cuMemHostAlloc", unsafe { allocate(&mut host, size, PORTABLE_AND_MAPPED) })?;
        // SAFETY: `size` bytes that the driver has just handed out; nobody else knows them.
        unsafe { host.cast::<u8>().write_bytes(0, size) };
        let mut device = 0;
        // SAFETY: `device` is a place for one CUdeviceptr; flags must be 0.
        check("cuMemHostGetDevicePointer", unsafe { address(&mut device, host, 0) })?;
        Ok(Slots { host: host.cast::<Slot>(), device, count })
    }

    fn at(&self, slot: u32) -> &Slot {
        assert!(slot <= self.count);
        // SAFETY: one of the `count + 1` slots; all-zero atomics were valid from the start.
        unsafe { &*self.host.add(slot as usize) }
    }

    /// Clears a slot for a launch; its address and the alarm's, as the device knows them.
    fn lend(&self, slot: u32) -> (u64, u64) {
        for (n, word) in self.at(slot).words.iter().enumerate() {
            word.store(if n % 2 == 0 { u64::MAX } else { 0 }, Ordering::Release);
        }
        let address = |slot: u32| self.device + u64::from(slot) * size_of::<Slot>() as u64;
        (address(slot), address(self.count))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_library_carries_the_kernels_that_it_launches() {
        let entry = |name: &str, words: usize| {
            let start = PTX.find(&format!(".entry {name}(")).expect("shipped");
            let head = &PTX[start..start + PTX[start..].find(')').expect("a list of parameters")];
            assert_eq!(head.matches(".param .u64").count(), words, "{name}");
            assert_eq!(head.matches(".param").count(), words, "{name} takes words only");
        };
        entry("strandline_guard_arm", 5);
        entry("strandline_guard_retire", 9);
        entry("strandline_guard_check", 5);
        assert!(PTX.contains(".target sm_70") && PTX.is_ascii() && !PTX.contains('\0'));
        assert_eq!(size_of::<Slot>(), 48, "struct slot of guard.cu");
    }
}
