//! One CUDA device behind the seam: the [`Driver`] that a heap allocates GPU memory from.
//!
//! Must not know: the heap, torch, Python. Everything is asked of the driver (`libcuda`), nothing of the
//! CUDA runtime. Invariants: no function panics or leaves the thread in another context or capture mode
//! than it came in; every mapping that exists is in `mappings`, with access for this device and for every
//! other device of this process that can reach it; what is given back after the driver has shut down
//! (process exit) counts as given back.

mod context;
mod events;
mod guard;
mod ipc;
mod peers;
mod symbols;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use cudarc::driver::sys;
use parking_lot::Mutex;

use self::context::{Context, Relaxed, check, check_release, is_gone};
use self::events::EventPool;
use self::symbols::{Symbols, VirtualMemory, code, symbols};
use super::cost::{Call, Costs};
use super::journal::{Change, Journal};
use super::{Address, Driver, DriverError, Event, Handle, MemoryInfo, Result, Stream};

pub use self::guard::{Edges, Findings, Found, GuardKernels};
pub use self::ipc::{Exported, Imported, on_close};

/// Device attributes by the driver's numbers (`CUdevice_attribute`).
mod attribute {
    pub const VIRTUAL_MEMORY: i32 = 102;
    pub const POSIX_FD_HANDLES: i32 = 103;
    pub const RDMA_WITH_VIRTUAL_MEMORY: i32 = 110;
}

/// The page size where virtual memory is missing: what `cuMemAlloc` segments are rounded to.
const PLAIN_GRANULARITY: u64 = 2 << 20;

/// What a stream's capture status call answers for the legacy stream while another stream captures.
const STREAM_CAPTURE_IMPLICIT: i32 = 906;

/// Why a context's event cannot be recorded just now: a stream of it captures.
const CAPTURE_UNSUPPORTED: i32 = 900;

/// One CUDA device. A clone names the same device, for calls that need no heap's lock.
#[derive(Clone)]
pub struct CudaDriver {
    shared: Arc<Shared>,
}

/// What a device's driver shares with the drivers of its peers.
struct Shared {
    symbols: &'static Symbols,
    context: Context,
    ordinal: i32,
    virtual_memory: Option<VirtualMemory>,
    granularity: u64,
    /// Whether handles are made exportable as file descriptors; taken back at the first refusal.
    posix_fd: AtomicBool,
    rdma: bool,
    events: EventPool,
    journal: Journal,
    costs: Costs,
    own_stream: Mutex<Option<Stream>>,
    /// Whether events of the whole context can be recorded; taken back at the first refusal.
    records_context: AtomicBool,
    mappings: Mutex<Mappings>,
}

/// What is mapped and who may reach it.
struct Mappings {
    /// Start of a mapping → its size and handle.
    at: BTreeMap<Address, Mapping>,
    /// This device first, then its peers.
    access: Vec<sys::CUmemAccessDesc>,
}

#[derive(Clone, Copy)]
struct Mapping {
    size: u64,
    handle: u64,
    /// The handle as a file descriptor, once it was shared with another process.
    exported: Option<i32>,
}

impl CudaDriver {
    /// How many devices the process may use (`CUDA_VISIBLE_DEVICES` applies). Makes no context.
    pub fn device_count() -> Result<i32> {
        let symbols = symbols()?;
        let mut count = 0;
        // SAFETY: cuInit may be called any number of times, with flags 0.
        check("cuInit", unsafe { (symbols.init)(0) })?;
        // SAFETY: `count` is a place for one int.
        check("cuDeviceGetCount", unsafe { (symbols.device_count)(&mut count) })?;
        Ok(count)
    }

    /// Opens the device with this ordinal and makes its primary context if nobody has (some 100 ms and
    /// some 100 MiB of device memory): open a device when the first block is asked of it, not before.
    pub fn new(ordinal: i32) -> Result<CudaDriver> {
        let symbols = symbols()?;
        let context = Context::retain(symbols, ordinal)?;
        let has = |number| device_attribute(symbols, context.device(), number);
        let virtual_memory = symbols.virtual_memory().filter(|_| has(attribute::VIRTUAL_MEMORY));
        let mut shared = Shared {
            symbols,
            ordinal,
            virtual_memory,
            granularity: PLAIN_GRANULARITY,
            posix_fd: AtomicBool::new(has(attribute::POSIX_FD_HANDLES)),
            rdma: has(attribute::RDMA_WITH_VIRTUAL_MEMORY),
            events: EventPool::new(symbols),
            journal: Journal::default(),
            costs: Costs::default(),
            own_stream: Mutex::new(None),
            records_context: AtomicBool::new(true),
            mappings: Mutex::new(Mappings {
                at: BTreeMap::new(),
                access: vec![peers::read_and_write(context.device())],
            }),
            context,
        };
        shared.granularity = shared.read_granularity()?;
        let shared = Arc::new(shared);
        peers::introduce(&shared);
        Ok(CudaDriver { shared })
    }

    /// The device's ordinal.
    pub fn ordinal(&self) -> i32 {
        self.shared.ordinal
    }

    /// Whether the calling thread is in this device's primary context.
    pub fn is_current(&self) -> bool {
        self.shared.context.is_current()
    }

    /// The driver's own name of a failure's code, for messages.
    pub fn describe(error: &DriverError) -> String {
        match (error, symbols()) {
            (DriverError::Failed { code, .. }, Ok(symbols)) => match symbols.name_of(*code) {
                Some(name) => format!("{error} ({name})"),
                None => error.to_string(),
            },
            _ => error.to_string(),
        }
    }

    /// Whether a failure says that the driver is gone, because the process exits.
    pub fn is_gone(error: &DriverError) -> bool {
        is_gone(error)
    }

    /// Lets kernels of another device reach this device's memory, past and future. Devices that this
    /// process opened know each other already; this is for a peer on which it has allocated nothing.
    pub fn enable_peer(&self, peer: i32) -> Result<()> {
        let peer = Context::retain(self.shared.symbols, peer)?;
        self.shared.admit(&peer)
    }

    /// Whether the driver says of this stream if it captures: not with an error, and not that the legacy stream
    /// must not be touched while another one captures.
    pub fn can_ask_of_capture(&self, stream: Stream) -> bool {
        matches!(self.capture_status(stream), Ok((code::SUCCESS, _)))
    }

    /// The driver's result code and, where that is success, the stream's status. No driver that cannot capture
    /// has a stream that does.
    fn capture_status(&self, stream: Stream) -> Result<(i32, u32)> {
        let Some(is_capturing) = self.shared.symbols.stream_is_capturing else {
            return Ok((code::SUCCESS, 0));
        };
        let _entered = self.shared.context.enter()?;
        let mut status = 0;
        // SAFETY: `status` is a place for one enum; a stream of the framework.
        let result = unsafe { is_capturing(raw_stream(stream), &mut status) };
        Ok((result, status))
    }

    /// Copies between devices that cannot reach each other's memory, in `stream`'s order.
    pub fn copy_between(
        &self,
        to: Address,
        from: Address,
        from_device: i32,
        size: u64,
        stream: Stream,
    ) -> Result<()> {
        let copy = self.shared.symbols.copy_peer.ok_or(DriverError::Unsupported("cuMemcpyPeerAsync"))?;
        let source = Context::retain(self.shared.symbols, from_device)?;
        let _entered = source.enter()?;
        // SAFETY: the caller vouches for both ranges; both contexts are retained for the process's life.
        check("cuMemcpyPeerAsync", unsafe {
            copy(to, self.shared.context.raw(), from, source.raw(), size as usize, raw_stream(stream))
        })
    }
}

impl CudaDriver {
    /// An event behind the present work of `streams`: where the driver cannot record one for the whole
    /// context, a stream of our own waits for each of them, and the event is recorded there.
    fn gather(&self, streams: &[Stream]) -> Result<Event> {
        let own = self.shared.own_stream()?;
        for &stream in streams {
            let event = self.record_event(stream)?;
            let waits = self.stream_wait_event(own, event);
            self.shared.events.give(event);
            waits?;
        }
        self.record_event(own)
    }
}

impl Shared {
    /// A stream on which nothing runs, made at the first call.
    fn own_stream(&self) -> Result<Stream> {
        let mut own = self.own_stream.lock();
        if let Some(stream) = *own {
            return Ok(stream);
        }
        const NON_BLOCKING: u32 = 1;
        let create = self.symbols.stream_create.ok_or(DriverError::Unsupported("cuStreamCreate"))?;
        let _entered = self.context.enter()?;
        let mut stream: sys::CUstream = std::ptr::null_mut();
        // SAFETY: `stream` is a place for one stream.
        check("cuStreamCreate", unsafe { create(&mut stream, NON_BLOCKING) })?;
        Ok(*own.insert(Stream(stream as u64)))
    }

    /// What memory is asked of the driver: as torch's own expandable segments ask.
    fn properties(&self) -> sys::CUmemAllocationProp {
        use sys::{CUmemAllocationHandleType, CUmemAllocationType, CUmemLocationType};
        // SAFETY: all-zero is a valid value of this C struct of integers and pointers; CUmemAllocationType
        // has the value 0 (INVALID), CUmemLocationType too.
        let mut properties: sys::CUmemAllocationProp = unsafe { std::mem::zeroed() };
        properties.type_ = CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
        properties.location.type_ = CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
        properties.location.id = self.context.device();
        if self.posix_fd.load(Ordering::Relaxed) {
            properties.requestedHandleTypes =
                CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
        }
        properties.allocFlags.gpuDirectRDMACapable = u8::from(self.rdma);
        properties
    }

    fn read_granularity(&self) -> Result<u64> {
        let Some(virtual_memory) = self.virtual_memory else { return Ok(PLAIN_GRANULARITY) };
        const RECOMMENDED: u32 = 1;
        let mut size = 0usize;
        let properties = self.properties();
        // SAFETY: `size` is a place for one size_t; `properties` lives through the call.
        let result = unsafe { (virtual_memory.granularity)(&mut size, &properties, RECOMMENDED) };
        check("cuMemGetAllocationGranularity", result)?;
        // A driver that answers 0 or no power of two would break every rounding in the heap.
        if size.is_power_of_two() {
            Ok(size as u64)
        } else {
            Err(DriverError::Unsupported("a page size that is no power of two"))
        }
    }

    fn vmm(&self, call: &'static str) -> Result<VirtualMemory> {
        self.virtual_memory.ok_or(DriverError::Unsupported(call))
    }

    /// Runs a call that gives something back, in the device's context; once the driver is gone, there is
    /// nothing left to give back.
    fn giving_back(&self, call: &'static str, run: impl FnOnce() -> i32) -> Result<()> {
        match self.context.enter() {
            Ok(_entered) => {
                let _relaxed = Relaxed::enter(self.symbols);
                check_release(call, run())
            }
            Err(error) if is_gone(&error) => Ok(()),
            Err(error) => Err(error),
        }
    }
}

impl Driver for CudaDriver {
    fn has_virtual_memory(&self) -> bool {
        self.shared.virtual_memory.is_some()
    }

    fn granularity(&self) -> u64 {
        self.shared.granularity
    }

    fn has_aliases(&self) -> bool {
        self.has_virtual_memory()
    }

    fn memory_info(&self) -> Result<MemoryInfo> {
        let _timed = self.shared.costs.time(Call::Info);
        let _entered = self.shared.context.enter()?;
        let _relaxed = Relaxed::enter(self.shared.symbols);
        let (mut free, mut total) = (0usize, 0usize);
        // SAFETY: `free` and `total` are places for one size_t each.
        check("cuMemGetInfo", unsafe { (self.shared.symbols.mem_info)(&mut free, &mut total) })?;
        Ok(MemoryInfo { free: free as u64, total: total as u64 })
    }

    fn reserve(&self, size: u64) -> Result<Address> {
        let _timed = self.shared.costs.time(Call::Reserve);
        let vmm = self.shared.vmm("cuMemAddressReserve")?;
        let _entered = self.shared.context.enter()?;
        let mut at = 0;
        // SAFETY: `at` is a place for one CUdeviceptr.
        check("cuMemAddressReserve", unsafe { (vmm.reserve)(&mut at, size as usize, 0, 0, 0) })?;
        Ok(at)
    }

    fn unreserve(&self, at: Address, size: u64) -> Result<()> {
        let vmm = self.shared.vmm("cuMemAddressFree")?;
        // SAFETY: the heap names a range that `reserve` gave it and in which nothing is mapped.
        self.shared.giving_back("cuMemAddressFree", || unsafe { (vmm.unreserve)(at, size as usize) })
    }

    fn create(&self, size: u64) -> Result<Handle> {
        let _timed = self.shared.costs.time(Call::Create);
        let vmm = self.shared.vmm("cuMemCreate")?;
        let _entered = self.shared.context.enter()?;
        let _relaxed = Relaxed::enter(self.shared.symbols);
        let mut handle = 0;
        let mut attempt = || {
            let properties = self.shared.properties();
            // SAFETY: `handle` is a place for one handle; `properties` lives through the call.
            unsafe { (vmm.create)(&mut handle, size as usize, &properties, 0) }
        };
        let mut result = attempt();
        // Some sandboxes refuse handles that can be exported; then memory that cannot be is better than none.
        let refused = matches!(
            result,
            code::NOT_SUPPORTED | code::NOT_PERMITTED | code::INVALID_VALUE | code::INVALID_DEVICE
        );
        if refused && self.shared.posix_fd.swap(false, Ordering::Relaxed) {
            let again = attempt();
            if again != code::SUCCESS {
                // It was not the export: leave the wish as it was and report the first refusal.
                self.shared.posix_fd.store(true, Ordering::Relaxed);
            } else {
                result = again;
            }
        }
        check("cuMemCreate", result)?;
        Ok(Handle(handle))
    }

    fn destroy(&self, handle: Handle) -> Result<()> {
        let _timed = self.shared.costs.time(Call::Destroy);
        let vmm = self.shared.vmm("cuMemRelease")?;
        // SAFETY: the heap names a handle that `create` gave it and that is mapped nowhere.
        self.shared.giving_back("cuMemRelease", || unsafe { (vmm.release)(handle.0) })
    }

    fn map(&self, at: Address, size: u64, handle: Handle) -> Result<()> {
        let _timed = self.shared.costs.time(Call::Map);
        let vmm = self.shared.vmm("cuMemMap")?;
        let _entered = self.shared.context.enter()?;
        let _relaxed = Relaxed::enter(self.shared.symbols);
        // Held from before the mapping exists, so that a device opened meanwhile is not overlooked.
        let mut mappings = self.shared.mappings.lock();
        // SAFETY: `at` lies in a reserved range, `handle` is a live handle of `size` bytes.
        check("cuMemMap", unsafe { (vmm.map)(at, size as usize, 0, handle.0, 0) })?;
        if let Err(error) = mappings.grant(vmm, at, size) {
            // SAFETY: undoes the mapping made above.
            unsafe { (vmm.unmap)(at, size as usize) };
            return Err(error);
        }
        mappings.at.insert(at, Mapping { size, handle: handle.0, exported: None });
        self.shared.journal.note(Change::Mapped, at, size);
        Ok(())
    }

    fn unmap(&self, at: Address, size: u64) -> Result<()> {
        let _timed = self.shared.costs.time(Call::Unmap);
        let vmm = self.shared.vmm("cuMemUnmap")?;
        let mut mappings = self.shared.mappings.lock();
        // SAFETY: the heap names one whole mapping that no work of the device uses any more.
        self.shared.giving_back("cuMemUnmap", || unsafe { (vmm.unmap)(at, size as usize) })?;
        self.shared.journal.note(Change::Unmapped, at, size);
        if let Some(Mapping { exported: Some(file), .. }) = mappings.at.remove(&at) {
            ipc::withdraw(file);
            // SAFETY: the descriptor was made for this mapping and is known to nobody else here.
            unsafe { libc::close(file) };
        }
        Ok(())
    }

    fn allocate(&self, size: u64) -> Result<Address> {
        let _timed = self.shared.costs.time(Call::Create);
        let _entered = self.shared.context.enter()?;
        let _relaxed = Relaxed::enter(self.shared.symbols);
        let mut at = 0;
        // SAFETY: `at` is a place for one CUdeviceptr.
        check("cuMemAlloc", unsafe { (self.shared.symbols.mem_alloc)(&mut at, size as usize) })?;
        self.shared.journal.note(Change::Allocated, at, size);
        Ok(at)
    }

    fn deallocate(&self, at: Address, size: u64) -> Result<()> {
        let _timed = self.shared.costs.time(Call::Destroy);
        // SAFETY: the heap names a segment that `allocate` gave it.
        self.shared.giving_back("cuMemFree", || unsafe { (self.shared.symbols.mem_free)(at) })?;
        self.shared.journal.note(Change::Deallocated, at, size);
        Ok(())
    }

    fn record_event(&self, stream: Stream) -> Result<Event> {
        let _timed = self.shared.costs.time(Call::Record);
        let _entered = self.shared.context.enter()?;
        let event = self.shared.events.take()?;
        // SAFETY: the event is live, the stream is one of the framework's in this context.
        let result = unsafe { (self.shared.symbols.event_record)(raw_event(event), raw_stream(stream)) };
        if let Err(error) = check("cuEventRecord", result) {
            self.shared.events.give(event);
            return Err(error);
        }
        Ok(event)
    }

    fn record_device_event(&self, streams: &[Stream]) -> Result<Event> {
        let _timed = self.shared.costs.time(Call::Record);
        let record = self.shared.symbols.context_record_event;
        let Some(record) = record.filter(|_| self.shared.records_context.load(Ordering::Relaxed)) else {
            return self.gather(streams);
        };
        let _entered = self.shared.context.enter()?;
        let event = self.shared.events.take()?;
        // SAFETY: the context is retained for the process's life, the event is live and of this context.
        let result = unsafe { record(self.shared.context.raw(), raw_event(event)) };
        match check("cuCtxRecordEvent", result) {
            Ok(()) => Ok(event),
            Err(error) => {
                self.shared.events.give(event);
                if matches!(result, CAPTURE_UNSUPPORTED | STREAM_CAPTURE_IMPLICIT) || is_gone(&error) {
                    return Err(error);
                }
                // Some contexts cannot do it; then it is not tried again.
                self.shared.records_context.store(false, Ordering::Relaxed);
                self.gather(streams)
            }
        }
    }

    fn query_event(&self, event: Event) -> Result<bool> {
        let _timed = self.shared.costs.time(Call::Query);
        // A query is among the calls that a capture on another thread forbids.
        let _relaxed = Relaxed::enter(self.shared.symbols);
        // SAFETY: the event is live: it came from `record_event` and was not given back.
        match unsafe { (self.shared.symbols.event_query)(raw_event(event)) } {
            code::NOT_READY => Ok(false),
            result => check_release("cuEventQuery", result).map(|()| true),
        }
    }

    fn wait_event(&self, event: Event) -> Result<()> {
        let _timed = self.shared.costs.time(Call::Wait);
        let _relaxed = Relaxed::enter(self.shared.symbols);
        // SAFETY: as in `query_event`.
        let result = unsafe { (self.shared.symbols.event_synchronize)(raw_event(event)) };
        check_release("cuEventSynchronize", result)
    }

    fn release_event(&self, event: Event) -> Result<()> {
        self.shared.events.give(event);
        Ok(())
    }

    fn stream_wait_event(&self, stream: Stream, event: Event) -> Result<()> {
        let _entered = self.shared.context.enter()?;
        // SAFETY: a live event and a stream of the framework.
        let result =
            unsafe { (self.shared.symbols.stream_wait_event)(raw_stream(stream), raw_event(event), 0) };
        check("cuStreamWaitEvent", result)
    }

    fn synchronize_stream(&self, stream: Stream) -> Result<()> {
        let _timed = self.shared.costs.time(Call::Wait);
        // SAFETY: a stream of the framework in this context.
        self.shared.giving_back("cuStreamSynchronize", || unsafe {
            (self.shared.symbols.stream_synchronize)(raw_stream(stream))
        })
    }

    fn synchronize_device(&self) -> Result<()> {
        let _timed = self.shared.costs.time(Call::Wait);
        // SAFETY: needs a current context, which `giving_back` enters.
        self.shared.giving_back("cuCtxSynchronize", || unsafe { (self.shared.symbols.context_synchronize)() })
    }

    fn is_capturing(&self, stream: Stream) -> Result<bool> {
        let (result, status) = self.capture_status(stream)?;
        // The legacy stream may not be touched while a blocking stream captures: it counts as capturing.
        if result == STREAM_CAPTURE_IMPLICIT {
            return Ok(true);
        }
        check("cuStreamIsCapturing", result)?;
        Ok(status != 0)
    }

    fn costs(&self) -> Option<&Costs> {
        Some(&self.shared.costs)
    }

    fn journal(&self) -> Option<&Journal> {
        Some(&self.shared.journal)
    }
}

/// Whether a device has an attribute (a missing answer is a no).
fn device_attribute(symbols: &Symbols, device: sys::CUdevice, number: i32) -> bool {
    let mut value = 0;
    // SAFETY: `value` is a place for one int.
    let result = unsafe { (symbols.device_attribute)(&mut value, number, device) };
    result == code::SUCCESS && value != 0
}

fn raw_stream(stream: Stream) -> sys::CUstream {
    stream.0 as sys::CUstream
}

fn raw_event(event: Event) -> sys::CUevent {
    event.0 as sys::CUevent
}
