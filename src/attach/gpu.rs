//! The GPUs of a process: what torch asks of its allocator, answered from heaps and ledgers.
//!
//! Must not know torch's layouts. Invariants: a device is opened at its first block, never before (a job that
//! only asks how many there are must not make a context); in a forked child nothing is touched.

use super::guard::gpus::Guards;
use super::history::{Action, Wish};
use super::outcome;
use super::process::{self, Stacks};
use super::served::Served;
use super::torch::{self, Filter, PoolId, PoolState, Refusal, Restored, Service, Shared};
use super::watched::Watched;
use crate::driver::cuda::{CudaDriver, Imported};
use crate::driver::{Address, Driver, DriverError, MemoryInfo, Stream};
use crate::heap::{self, BlockState, Config, Heap, HeapError, Split};
use crate::ledger::{Clock, Symbols};
use crate::stacks::{self, StackId};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

/// Requests from here on are a mistake in the program; torch's own allocator says so, too.
const EXA: u64 = 1 << 60;

/// Devices that a process may have.
pub const DEVICES: usize = 64;

/// Every GPU of the process.
pub struct Gpus {
    pub(super) clock: &'static Clock,
    served: [OnceLock<Served<CudaDriver>>; DEVICES],
    /// One thread opens a device at a time: a driver call may take a second.
    pub(super) opening: Mutex<()>,
    fractions: Mutex<HashMap<i32, f64>>,
    /// The last wish for past events, for devices that are opened later.
    wish: Mutex<Option<Wish>>,
    imported: Mutex<HashMap<Address, (i32, Imported)>>,
    /// `torch.cuda.caching_allocator_enable(False)`: blocks come straight from the driver; these are live.
    uncached: AtomicBool,
    direct: Mutex<HashMap<Address, (i32, u64)>>,
    /// What others hand out: torch's own allocator in observer mode, or CUDA itself. Behind the devices come
    /// two kinds of host memory (`process::PINNED`, `process::MANAGED`).
    pub(super) watched: [OnceLock<Watched>; DEVICES + 2],
    /// Where guard mode was asked for.
    pub(super) guards: Option<Guards>,
    /// Blocks that CUDA itself handed out.
    pub(super) foreign: Mutex<super::foreign::Blocks>,
}

impl Gpus {
    /// No device is opened yet.
    pub fn new(clock: &'static Clock, guarded: bool) -> Self {
        Gpus {
            clock,
            guards: guarded.then(Guards::default),
            served: [const { OnceLock::new() }; DEVICES],
            opening: Mutex::new(()),
            fractions: Mutex::new(HashMap::new()),
            wish: Mutex::new(None),
            imported: Mutex::new(HashMap::new()),
            uncached: AtomicBool::new(false),
            direct: Mutex::new(HashMap::new()),
            watched: [const { OnceLock::new() }; DEVICES + 2],
            foreign: Mutex::default(),
        }
    }

    /// The devices that have served a block.
    pub fn open(&self) -> impl Iterator<Item = &Served<CudaDriver>> {
        self.served.iter().filter_map(OnceLock::get)
    }

    /// The devices that are watched.
    pub fn seen(&self) -> impl Iterator<Item = &Watched> {
        self.watched.iter().filter_map(OnceLock::get)
    }

    pub(super) fn known(&self, device: i32) -> Option<&Served<CudaDriver>> {
        self.served.get(usize::try_from(device).ok()?)?.get()
    }

    #[inline]
    pub(super) fn device(&self, device: i32) -> Result<&Served<CudaDriver>, Refusal> {
        match self.known(device) {
            Some(served) => Ok(served),
            None => self.first_use(device),
        }
    }

    #[cold]
    fn first_use(&self, device: i32) -> Result<&Served<CudaDriver>, Refusal> {
        let place = usize::try_from(device).ok().and_then(|n| self.served.get(n));
        let Some(place) = place else {
            return Err(Refusal::Failed(format!("strandline: there is no GPU {device}.")));
        };
        let _one = self.opening.lock();
        if let Some(served) = place.get() {
            return Ok(served);
        }
        if self.watched.get(device as usize).is_some_and(|watched| watched.get().is_some()) {
            return Err(Refusal::Failed(format!(
                "strandline already watches what others allocate on GPU {device}, and does not serve it as well: \
                 open the device before the first block of CUDA's own."
            )));
        }
        let failed = |error: &DriverError| {
            Refusal::Failed(format!("strandline cannot use GPU {device}: {}.", CudaDriver::describe(error)))
        };
        let driver = CudaDriver::new(device).map_err(|error| failed(&error))?;
        let total = driver.memory_info().map_err(|error| failed(&error))?.total;
        let conf = super::conf::Conf::of_this_process();
        let preset = Config::of(conf.preset.unwrap_or_default());
        let mut config = Config { device: device as u32, limit: self.limit(device, total), ..preset };
        let (slack, wait) = (conf.slack, conf.slack_before_wait);
        config.slack = slack.unwrap_or(config.slack);
        config.slack_moving = slack.unwrap_or(config.slack_moving);
        config.slack_kept = slack.unwrap_or(config.slack_kept);
        config.ahead = config.ahead.min(slack.unwrap_or(config.ahead));
        config.slack_before_wait = wait.unwrap_or(config.slack_before_wait);
        if let Some(guards) = &self.guards {
            guards.open(device, driver.clone(), total);
        }
        let heap = Heap::new(driver, config)
            .map_err(|error| Refusal::Failed(format!("strandline cannot use GPU {device}: {error}.")))?;
        let served = place.get_or_init(|| Served::new(device, heap, Some(total)));
        if let Some(wish) = &*self.wish.lock() {
            served.record_history(wish);
        }
        Ok(served)
    }

    fn limit(&self, device: i32, total: u64) -> Option<u64> {
        let fraction = self.fractions.lock().get(&device).copied().unwrap_or(1.0);
        (fraction < 1.0).then_some((fraction * total as f64) as u64)
    }

    /// The device and block of an address, if a heap of ours handed it out.
    pub(super) fn owner(&self, at: Address) -> Option<&Served<CudaDriver>> {
        self.known(heap::AddressSpace::device_of(at)? as i32)
    }

    /// A block of its own from the driver, for tools that watch the driver's allocations.
    #[cold]
    fn malloc_direct(&self, served: &Served<CudaDriver>, size: u64) -> Result<Address, Refusal> {
        let device = served.device();
        match served.lock().heap.driver().allocate(size) {
            Ok(at) => {
                self.direct.lock().insert(at, (device, size));
                Ok(at)
            }
            Err(DriverError::OutOfMemory) => Err(Refusal::OutOfMemory(format!(
                "CUDA out of memory. Tried to allocate {} on GPU {device} with the caching allocator disabled.",
                outcome::torch_size(size)
            ))),
            Err(error) => Err(Refusal::Failed(CudaDriver::describe(&error))),
        }
    }

    /// Gives a block of `malloc_direct` back; the driver waits for the work that uses it. Foreign addresses
    /// are ignored.
    #[cold]
    fn free_direct(&self, at: Address) {
        let Some((device, size)) = self.direct.lock().remove(&at) else { return };
        if let Some(served) = self.known(device) {
            let done = served.lock().heap.driver().deallocate(at, size);
            done.unwrap_or_else(|error| super::say(format_args!("{}", CudaDriver::describe(&error))));
        }
    }

    fn out_of_memory(&self, device: i32, error: &HeapError) -> Refusal {
        let HeapError::OutOfMemory { requested, allocated, reserved, in_pools, free, left, total, limit } =
            error
        else {
            return Refusal::Failed(format!("strandline: {error}."));
        };
        let size = outcome::torch_size;
        let mut text = format!(
            "CUDA out of memory. Tried to allocate {}. GPU {device} has a total capacity of {} of which {} is free",
            size(*requested),
            size(*total),
            size(*free)
        );
        if *left > 0 && requested <= free && free - left < *requested && limit.is_none() {
            text += &format!(" ({} of it is left for kernels and libraries)", size(*left));
        }
        text += ". ";
        if let Some(limit) = limit {
            text += &format!("{} allowed; ", size(*limit));
        }
        text += &format!("Of the allocated memory {} is allocated by PyTorch, ", size(*allocated));
        if *in_pools > 0 {
            text += &format!("with {} reserved in private pools (e.g., CUDA Graphs), ", size(*in_pools));
        }
        text += &format!(
            "and {} is reserved by PyTorch but unallocated.",
            size(reserved.saturating_sub(*allocated))
        );
        if let Some(state) = process::state() {
            text += &state.who_has_the_memory(device);
        }
        Refusal::OutOfMemory(text)
    }
}

/// The stack of an allocation: the thread's own Python frames; in a backward pass the forward line whose
/// gradient is being computed; else native frames.
#[inline]
pub(super) fn stack() -> StackId {
    let own = stacks::capture();
    match torch::autograd::link(own.0) {
        Some(forward) => StackId(forward),
        None if own == StackId::NONE => stacks::capture_with_native(),
        None => own,
    }
}

/// `None` in forked children and after a fault: nothing may be touched there.
#[inline]
fn alive() -> Option<()> {
    (!process::is_detached()).then_some(())
}

impl Service for Gpus {
    fn malloc(&self, size: usize, device: i32, stream: Stream) -> Result<Address, Refusal> {
        if alive().is_none() {
            if process::is_faulted() {
                return self.malloc_direct(self.device(device)?, size as u64);
            }
            return Err(Refusal::Failed("strandline: CUDA cannot be used in a forked process.".into()));
        }
        if size as u64 >= EXA {
            return Err(Refusal::OutOfMemory(
                "CUDA out of memory. Tried to allocate more than 1EB memory.".into(),
            ));
        }
        let served = self.device(device)?;
        if self.uncached.load(Ordering::Relaxed) {
            return self.malloc_direct(served, size as u64);
        }
        self.allocate(served, size as u64, stream, stack())
            .map_err(|error| self.out_of_memory(device, &error))
    }

    fn free(&self, at: Address) {
        match self.owner(at) {
            // In a forked child nothing may be touched; after a fault the heap's blocks stay where they are.
            _ if alive().is_none() && !process::is_faulted() => {}
            Some(served) if alive().is_some() => {
                self.deallocate(served, at).unwrap_or_else(super::fault_of_a_free);
            }
            Some(_) => {}
            None => self.free_direct(at),
        }
    }

    fn enable_cache(&self, on: bool) {
        self.uncached.store(!on, Ordering::Relaxed);
    }

    fn record_stream(&self, at: Address, stream: Stream) {
        if alive().is_some()
            && let Some(served) = self.owner(at)
        {
            // Foreign memory is named too; the contract is to ignore it.
            let _ = self.note_use(served, at, stream);
        }
    }

    fn empty_cache(&self, _pool: Option<PoolId>) {
        if alive().is_some() {
            self.let_go();
            for served in self.open() {
                served.trim();
            }
        }
    }

    fn set_memory_fraction(&self, fraction: f64, device: i32) {
        self.fractions.lock().insert(device, fraction);
        if let Some(served) = self.known(device) {
            let limit = served.total().and_then(|total| self.limit(device, total));
            served.lock().heap.set_limit(limit);
        }
    }

    fn memory_fraction(&self, device: i32) -> f64 {
        self.fractions.lock().get(&device).copied().unwrap_or(1.0)
    }

    fn base_allocation(&self, at: Address) -> Option<(Address, u64)> {
        let segments = self.owner(at)?.lock().heap.segments();
        segments
            .into_iter()
            .find(|segment| (segment.address..segment.address + segment.size).contains(&at))
            .map(|segment| (segment.address, segment.size))
    }

    fn largest_available(&self, device: i32) -> u64 {
        let Ok(served) = self.device(device) else { return 0 };
        let books = served.lock();
        let free = books.heap.driver().memory_info().map_or(0, |info| info.free);
        // Idle pages can be moved to wherever they are needed, so all of them count.
        let idle = books.heap.reserved().saturating_sub(books.heap.allocated());
        let room = books.heap.limit().map_or(u64::MAX, |limit| limit.saturating_sub(books.heap.allocated()));
        (free + idle).min(room)
    }

    fn memory_info(&self, device: i32) -> Option<MemoryInfo> {
        self.device(device).ok()?.lock().heap.driver().memory_info().ok()
    }

    fn begin_pool(&self, device: i32, pool: PoolId, filter: Filter) -> bool {
        let Ok(served) = self.device(device) else { return false };
        let mut books = served.lock();
        let driver = books.heap.driver().clone();
        // torch's filter of a graph throws where the stream cannot be asked, which must not happen under the
        // lock: such a stream is not of the pool, and torch's next call on it says what is wrong with it.
        let filter = Box::new(move |stream| driver.can_ask_of_capture(stream) && filter.accepts(stream));
        match books.heap.begin_pool(heap_pool(pool), filter) {
            Ok(()) => true,
            Err(error) => {
                super::say(format_args!("{error}"));
                false
            }
        }
    }

    fn end_pool(&self, device: i32, pool: PoolId) {
        if let Some(served) = self.known(device) {
            let done = served.lock().heap.end_pool(heap_pool(pool));
            done.unwrap_or_else(|error| super::say(format_args!("{error}")));
        }
    }

    fn release_pool(&self, device: i32, pool: PoolId) {
        let Some(served) = self.known(device) else { return };
        let mut books = served.lock();
        // The heap counts each recording; torch's users were counted by the caller, and all are gone.
        while books.heap.pool_holds(heap_pool(pool)).is_some_and(|holds| holds > 0) {
            if books.heap.release_pool(heap_pool(pool)).is_err() {
                break;
            }
        }
    }

    fn pool_blocks(&self, device: i32, pool: PoolId) -> Option<Vec<Address>> {
        let mut found = Vec::new();
        self.known(device)?.lock().heap.for_each_live(|block| {
            if block.pool == heap_pool(pool) && block.state == BlockState::Allocated {
                found.push(block.address);
            }
        });
        Some(found)
    }

    fn checkpoint(&self, device: i32, pool: PoolId) -> Result<PoolState, Refusal> {
        self.checkpoint_pool(device, heap_pool(pool))
    }

    fn restore(&self, device: i32, state: &PoolState) -> Result<Restored, Refusal> {
        self.restore_pool(device, state)
    }

    fn stats(&self, device: i32) -> Option<torch::Stats> {
        Some(torch_stats(&self.known(device)?.lock().heap.stats()))
    }

    fn totals(&self, device: i32) -> (u64, u64) {
        let Some(served) = self.known(device) else { return (0, 0) };
        let books = served.lock();
        (books.heap.allocated(), books.heap.reserved())
    }

    fn requested_size(&self, at: Address) -> Option<(u64, i32)> {
        let served = self.owner(at)?;
        if let Some(size) = self.guarded_size(served, at) {
            return Some((size, served.device()));
        }
        let block = served.lock().heap.block_at(at).filter(|block| block.address == at)?;
        Some((block.requested, served.device()))
    }

    fn reset_peak(&self, device: i32) {
        if let Some(served) = self.known(device) {
            served.lock().heap.reset_peak();
        }
    }

    fn reset_accumulated(&self, device: i32) {
        if let Some(served) = self.known(device) {
            served.lock().heap.reset_accumulated();
        }
    }

    fn snapshot(&self, pool: Option<PoolId>, traces: bool) -> torch::Snapshot {
        let mut snapshot = torch::Snapshot::default();
        for served in self.open() {
            // One lock for all of it; symbols are looked up after it.
            let (segments, stacks, recorded, events) = {
                let mut books = served.lock();
                let mut events = books.history();
                let segments = books.heap.segments();
                let tags = segments.iter().flat_map(|segment| &segment.blocks).map(|block| block.tag);
                let stacks: HashMap<heap::Tag, u32> = tags.map(|tag| (tag, books.stack_of(tag))).collect();
                // What was recorded on request may say more (native frames) than the ledger needs.
                let recorded: HashMap<Address, u32> = events
                    .iter()
                    .filter(|event| event.action == Action::Alloc && event.stack != StackId::NONE)
                    .map(|event| (event.at, event.stack.0))
                    .collect();
                if !traces {
                    events.clear();
                }
                (segments, stacks, recorded, events)
            };
            let mut names: HashMap<u32, Vec<torch::Frame>> = HashMap::new();
            for segment in segments {
                if pool.is_some_and(|pool| heap_pool(pool) != segment.pool) {
                    continue;
                }
                let blocks = segment.blocks.iter().map(|block| torch::BlockInfo {
                    address: block.address,
                    size: block.size,
                    requested_size: block.requested,
                    state: match block.state {
                        BlockState::Allocated => "active_allocated",
                        BlockState::PendingFree => "active_pending_free",
                        BlockState::Inactive => "inactive",
                    },
                    frames: if block.state == BlockState::Inactive {
                        Vec::new()
                    } else {
                        let known = || stacks.get(&block.tag).copied().unwrap_or(0);
                        let stack = recorded.get(&block.address).copied().unwrap_or_else(known);
                        names.entry(stack).or_insert_with(|| torch_frames(stack)).clone()
                    },
                });
                snapshot.segments.push(torch::SegmentInfo {
                    device: served.device(),
                    address: segment.address,
                    total_size: segment.size,
                    allocated_size: segment.allocated(),
                    active_size: segment.active(),
                    requested_size: segment.requested(),
                    stream: segment.stream.0,
                    segment_type: if segment.large { "large" } else { "small" },
                    segment_pool_id: (segment.pool.0, segment.pool.1),
                    is_expandable: segment.expandable,
                    frames: Vec::new(),
                    blocks: blocks.collect(),
                });
            }
            snapshot.device_traces.resize((served.device() + 1) as usize, Vec::new());
            for event in &events {
                snapshot.stacks.entry(event.stack.0).or_insert_with(|| torch_frames(event.stack.0));
            }
            snapshot.device_traces[served.device() as usize] = events
                .iter()
                .map(|event| torch::TraceEntry {
                    action: event.action.name(),
                    addr: event.at,
                    size: event.size,
                    stream: event.stream.0,
                    time_us: event.time_us,
                    stack: event.stack.0,
                })
                .collect();
        }
        snapshot.segments.sort_by_key(|segment| segment.address);
        snapshot
    }

    fn record_history(&self, wish: &Wish) {
        *self.wish.lock() = Some(*wish);
        for served in self.open() {
            served.record_history(wish);
        }
    }

    fn enable_peer(&self, device: i32, peer: i32) -> Result<(), Refusal> {
        let done = self.device(device)?.lock().heap.driver().enable_peer(peer);
        done.map_err(|error| Refusal::Failed(CudaDriver::describe(&error)))
    }

    fn copy_between(
        &self,
        to: (Address, i32),
        from: (Address, i32),
        size: u64,
        stream: Stream,
    ) -> Result<(), Refusal> {
        let served = self.device(to.1)?;
        let done = served.lock().heap.driver().copy_between(to.0, from.0, from.1, size, stream);
        done.map_err(|error| Refusal::Failed(CudaDriver::describe(&error)))
    }

    fn share(&self, at: Address) -> Result<Shared, Refusal> {
        let unknown = || Refusal::Failed("strandline: the tensor to be shared is not in its memory.".into());
        let served = self.owner(at).ok_or_else(unknown)?;
        let books = served.lock();
        let block = books.heap.block_at(at).ok_or_else(unknown)?;
        let exported = books.heap.driver().export(block.address, block.size);
        let exported = exported.map_err(|error| Refusal::Failed(CudaDriver::describe(&error)))?;
        // torch may name a place inside a block (storage made by from_dlpack).
        let offset = exported.offset + (at - block.address);
        Ok(Shared { device: served.device(), offset, pieces: exported.pieces })
    }

    fn open_shared(&self, device: i32, pieces: &[(i32, u64)]) -> Result<Address, Refusal> {
        let imported = self.device(device)?.lock().heap.driver().import(pieces);
        let imported = imported.map_err(|error| Refusal::Failed(CudaDriver::describe(&error)))?;
        let at = imported.at;
        self.imported.lock().insert(at, (device, imported));
        Ok(at)
    }

    fn close_shared(&self, at: Address) {
        let Some((device, imported)) = self.imported.lock().remove(&at) else { return };
        if let Some(served) = self.known(device) {
            let done = served.lock().heap.driver().forget(imported);
            done.unwrap_or_else(|error| super::say(format_args!("{}", CudaDriver::describe(&error))));
        }
    }

    fn observed(&self, at: Address, size: i64, device: i32, allocated: u64, reserved: u64) {
        if alive().is_none() {
            return;
        }
        let Some(place) =
            usize::try_from(device).ok().filter(|n| *n < DEVICES).and_then(|n| self.watched.get(n))
        else {
            return;
        };
        let watched = place.get_or_init(|| Watched::new(device));
        watched.saw(
            at,
            size,
            allocated,
            reserved,
            if size > 0 { stack() } else { StackId::NONE },
            self.clock,
        );
    }
}

fn heap_pool(pool: PoolId) -> heap::PoolId {
    heap::PoolId(pool.0, pool.1)
}

fn torch_frames(stack: u32) -> Vec<torch::Frame> {
    Stacks
        .frames(stack)
        .into_iter()
        .map(|frame| torch::Frame { name: frame.function, filename: frame.file, line: frame.line })
        .collect()
}

fn torch_stats(stats: &heap::Stats) -> torch::Stats {
    let stat = |s: &heap::Stat| torch::Stat {
        current: s.current as i64,
        peak: s.peak as i64,
        allocated: s.allocated as i64,
        freed: s.freed as i64,
    };
    let array = |split: &Split| [stat(&split.all), stat(&split.small_pool), stat(&split.large_pool)];
    torch::Stats {
        allocation: array(&stats.allocation),
        segment: array(&stats.segment),
        active: array(&stats.active),
        inactive_split: array(&stats.inactive_split),
        allocated_bytes: array(&stats.allocated_bytes),
        reserved_bytes: array(&stats.reserved_bytes),
        active_bytes: array(&stats.active_bytes),
        inactive_split_bytes: array(&stats.inactive_split_bytes),
        requested_bytes: array(&stats.requested_bytes),
        num_alloc_retries: stats.num_alloc_retries as i64,
        num_ooms: stats.num_ooms as i64,
        num_sync_all_streams: stats.num_sync_all_streams as i64,
        num_device_alloc: stats.work.creates as i64,
        num_device_free: stats.work.destroys as i64,
        max_split_size: -1,
        ..torch::Stats::default()
    }
}
