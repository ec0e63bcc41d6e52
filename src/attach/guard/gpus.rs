//! The GPUs that are guarded: what torch, C and CUDA's own functions ask of a device, with the guard between them and
//! the heap where there is one.
//!
//! Must not know how a guard looks at memory. Invariant: a device whose kernels cannot be loaded is served as without
//! the guard, and that is said once.

use super::Faults;
use super::device::{DeviceGuard, FRONT};
use crate::attach::gpu::{DEVICES, Gpus};
use crate::attach::say;
use crate::attach::served::Served;
use crate::driver::cuda::CudaDriver;
use crate::driver::{Address, Stream};
use crate::heap::HeapError;
use crate::ledger::LiveBlock;
use crate::stacks::StackId;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// How long the end of the run waits for the last findings, of all GPUs together.
const LAST_LOOK: Duration = Duration::from_secs(10);

/// The guards of a process's GPUs.
pub struct Guards {
    devices: [OnceLock<DeviceGuard>; DEVICES],
    pub faults: Faults,
}

impl Default for Guards {
    fn default() -> Self {
        Guards { devices: [const { OnceLock::new() }; DEVICES], faults: Faults::default() }
    }
}

impl Guards {
    /// Guards a device that is being opened.
    pub fn open(&self, device: i32, driver: CudaDriver, total: u64) {
        let Some(place) = usize::try_from(device).ok().and_then(|n| self.devices.get(n)) else { return };
        match DeviceGuard::new(device, driver, total) {
            Ok(guard) => drop(place.set(guard)),
            Err(error) => say(format_args!(
                "GPU {device} is not guarded: {}. Guard mode needs a GPU of compute capability 7.0 and NVIDIA's driver \
                 of CUDA 10.1, or newer ones: update the driver, or leave --guard out. The job goes on without it",
                CudaDriver::describe(&error)
            )),
        }
    }

    fn of(&self, device: i32) -> Option<&DeviceGuard> {
        self.devices.get(usize::try_from(device).ok()?)?.get()
    }
}

impl Gpus {
    fn guard(&self, device: i32) -> Option<(&DeviceGuard, &Faults)> {
        let guards = self.guards.as_ref()?;
        Some((guards.of(device)?, &guards.faults))
    }

    /// Hands out a block of an open device.
    #[inline]
    pub fn allocate(
        &self,
        served: &Served<CudaDriver>,
        size: u64,
        stream: Stream,
        stack: StackId,
    ) -> Result<Address, HeapError> {
        match self.guard(served.device()) {
            None => served.malloc(size, stream, stack, self.clock),
            Some((guard, faults)) => guard.malloc(served, size, stream, stack, self.clock, faults),
        }
    }

    /// Takes a block of an open device back.
    #[inline]
    pub fn deallocate(&self, served: &Served<CudaDriver>, at: Address) -> Result<(), HeapError> {
        if let Some((guard, faults)) = self.guard(served.device())
            && let Some(done) = guard.free(served, at, self.clock, faults)
        {
            return done;
        }
        served.free(at, self.clock).map(drop)
    }

    /// Notes that another stream uses a block of an open device.
    pub fn note_use(
        &self,
        served: &Served<CudaDriver>,
        at: Address,
        stream: Stream,
    ) -> Result<(), HeapError> {
        if let Some((guard, _)) = self.guard(served.device())
            && guard.record_stream(at, stream)
        {
            return Ok(());
        }
        served.lock().heap.record_stream(at, stream)
    }

    /// For a block that may be used on any stream at once, as `cudaMalloc` promises: what the guard does with its memory
    /// in the legacy stream's order is done.
    pub fn settle_guard(&self, device: i32) {
        if let (Some(served), Some((guard, _))) = (self.known(device), self.guard(device)) {
            guard.settle_legacy(served);
        }
    }

    /// Gives what is held back to the heap, of every device.
    pub fn let_go(&self) {
        for served in self.open() {
            if let Some((guard, _)) = self.guard(served.device()) {
                guard.let_go(served);
            }
        }
    }

    /// The size that was requested of a block with patterns around it.
    pub fn guarded_size(&self, served: &Served<CudaDriver>, at: Address) -> Option<u64> {
        self.guard(served.device())?.0.size_of(at)
    }

    /// Blocks of a device as their users know them, without what surrounds them.
    pub fn as_users_know(&self, device: i32, mut blocks: Vec<LiveBlock>) -> Vec<LiveBlock> {
        let Some((guard, _)) = self.guard(device) else { return blocks };
        for block in &mut blocks {
            if let Some(size) = guard.size_of(block.address + FRONT) {
                (block.address, block.size) = (block.address + FRONT, size);
            }
        }
        blocks
    }

    /// At a step's end or for a report: says what the guards have found.
    pub fn look_at_guards(&self) {
        for served in self.open() {
            if let Some((guard, faults)) = self.guard(served.device()) {
                guard.look_now(served, faults);
            }
        }
    }

    /// At the end of the run: looks at everything that is guarded. No GPU takes the time of those after it.
    pub fn finish_guards(&self, quiet: bool) {
        let until = Instant::now() + LAST_LOOK;
        let guarded: Vec<_> = self.open().filter(|served| self.guard(served.device()).is_some()).collect();
        for (served, left) in guarded.iter().zip((1..=guarded.len() as u32).rev()) {
            if let Some((guard, faults)) = self.guard(served.device()) {
                let now = Instant::now();
                guard.finish(served, faults, quiet, now + until.saturating_duration_since(now) / left);
            }
        }
    }
}
