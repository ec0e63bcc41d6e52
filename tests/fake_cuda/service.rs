//! The simplest allocator that torch can live on: every block is a mapping of its own, gone when it is freed
//! (after the device has finished; blocks of a pool stay until the pool is released, as graphs need it).
//!
//! A library for tests/cuda_torch.rs: it exports torch's functions (from the strandline library that it
//! contains) over the CUDA driver, without the heap, so that a failure there is a failure of this seam.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use parking_lot::Mutex;
use strandline::attach::history::Wish;
use strandline::attach::torch::{
    BlockInfo, Filter, PoolId, PoolState, Refusal, Restored, SegmentInfo, Service, Shared, Snapshot, Stat,
    Stats, TraceEntry, autograd, install,
};
use strandline::driver::cuda::{CudaDriver, Imported};
use strandline::driver::{Address, Driver, DriverError, Handle, MemoryInfo, Stream};

#[derive(Default)]
struct State {
    devices: HashMap<i32, CudaDriver>,
    blocks: HashMap<Address, Block>,
    stats: HashMap<i32, Stats>,
    fraction: HashMap<i32, f64>,
    pools: Vec<(i32, PoolId, Filter)>,
    /// Freed blocks of pools that are still in use.
    resting: Vec<(Address, Block)>,
    imported: HashMap<Address, (i32, Imported)>,
    log: Vec<String>,
    history: bool,
    panicked: bool,
    traces: Vec<TraceEntry>,
    /// Stands for the stack of each allocation.
    stack: u32,
}

#[derive(Clone)]
struct Block {
    device: i32,
    size: u64,
    room: u64,
    handle: Handle,
    stream: Stream,
    pool: Option<PoolId>,
}

struct EachItsOwn(Mutex<State>);

/// The blocks of a pool.
type Kept = Vec<(Address, Block)>;

struct Taken(Kept);

impl Drop for Taken {
    fn drop(&mut self) {
        let service = SERVICE.lock().expect("installed");
        service.0.lock().log.push("state dropped".into());
    }
}

fn count(stat: &mut [Stat; 3], large: bool, by: i64) {
    for part in [0, if large { 2 } else { 1 }] {
        let stat = &mut stat[part];
        stat.current += by;
        stat.peak = stat.peak.max(stat.current);
        if by > 0 { stat.allocated += by } else { stat.freed -= by }
    }
}

impl State {
    fn driver(&mut self, device: i32) -> Result<&CudaDriver, DriverError> {
        match self.devices.entry(device) {
            Entry::Occupied(entry) => Ok(entry.into_mut()),
            Entry::Vacant(entry) => Ok(entry.insert(CudaDriver::new(device)?)),
        }
    }

    fn give_back(&self, at: Address, block: &Block) {
        let driver = &self.devices[&block.device];
        // Unmapping does not wait for kernels.
        driver.synchronize_device().unwrap();
        driver.unmap(at, block.room).unwrap();
        driver.destroy(block.handle).unwrap();
        driver.unreserve(at, block.room).unwrap();
    }

    fn account(&mut self, block: &Block, sign: i64) {
        let stats = self.stats.entry(block.device).or_default();
        stats.max_split_size = -1;
        let large = block.size > 1 << 20;
        for stat in [&mut stats.allocation, &mut stats.active, &mut stats.segment] {
            count(stat, large, sign);
        }
        for stat in [&mut stats.allocated_bytes, &mut stats.active_bytes, &mut stats.reserved_bytes] {
            count(stat, large, sign * block.room as i64);
        }
        count(&mut stats.requested_bytes, large, sign * block.size as i64);
    }

    fn note(&mut self, action: &'static str, at: Address, size: u64) {
        if self.history {
            self.traces.push(TraceEntry { action, addr: at, size, time_us: 1, ..TraceEntry::default() });
        }
    }
}

impl Service for EachItsOwn {
    fn malloc(&self, size: usize, device: i32, stream: Stream) -> Result<Address, Refusal> {
        let mut state = self.0.lock();
        // Of 13 bytes always; of 14 bytes the first time only: torch's functions ask once more.
        if size == 13 || (size == 14 && !std::mem::replace(&mut state.panicked, true)) {
            panic!("a fault on purpose");
        }
        state.stack += 1;
        if let Some(forward) = autograd::link(state.stack) {
            let line = format!("backward of {forward} at {}", state.stack);
            state.log.push(line);
        }
        let pool =
            state.pools.iter().find(|(d, _, f)| *d == device && f.accepts(stream)).map(|entry| entry.1);
        let driver = state.driver(device).map_err(|error| Refusal::Failed(CudaDriver::describe(&error)))?;
        let room = (size as u64).next_multiple_of(driver.granularity());
        let handle = driver.create(room).map_err(|error| match error {
            DriverError::OutOfMemory => {
                Refusal::OutOfMemory(format!("CUDA out of memory. Tried {size} bytes. \u{2713}"))
            }
            other => Refusal::Failed(other.to_string()),
        })?;
        let at = driver.reserve(room).unwrap();
        driver.map(at, room, handle).unwrap();
        let block = Block { device, size: size as u64, room, handle, stream, pool };
        state.account(&block, 1);
        state.blocks.insert(at, block);
        state.note("alloc", at, size as u64);
        Ok(at)
    }
    fn free(&self, at: Address) {
        let mut state = self.0.lock();
        let block = state.blocks.remove(&at).expect("a block that was allocated here");
        state.account(&block, -1);
        state.note("free_requested", at, block.size);
        if block.pool.is_some() {
            state.resting.push((at, block));
        } else {
            state.give_back(at, &block);
        }
    }
    fn record_stream(&self, at: Address, stream: Stream) {
        let mut state = self.0.lock();
        let known = state.blocks.contains_key(&at);
        state.log.push(format!("record_stream {known} {}", stream.0));
    }
    fn empty_cache(&self, pool: Option<PoolId>) {
        self.0.lock().log.push(format!("empty_cache {pool:?}"));
    }
    fn devices(&self, count: i32) {
        self.0.lock().log.push(format!("devices {count}"));
    }
    fn set_memory_fraction(&self, fraction: f64, device: i32) {
        self.0.lock().fraction.insert(device, fraction);
    }
    fn memory_fraction(&self, device: i32) -> f64 {
        self.0.lock().fraction.get(&device).copied().unwrap_or(1.0)
    }
    fn base_allocation(&self, at: Address) -> Option<(Address, u64)> {
        self.0.lock().blocks.get(&at).map(|block| (at, block.room))
    }
    fn largest_available(&self, _: i32) -> u64 {
        64 << 20
    }
    fn memory_info(&self, device: i32) -> Option<MemoryInfo> {
        self.0.lock().driver(device).ok()?.memory_info().ok()
    }
    fn begin_pool(&self, device: i32, pool: PoolId, filter: Filter) -> bool {
        let mut state = self.0.lock();
        state.log.push(format!("begin_pool {device} {pool:?}"));
        state.pools.push((device, pool, filter));
        true
    }
    fn end_pool(&self, device: i32, pool: PoolId) {
        let mut state = self.0.lock();
        state.log.push(format!("end_pool {device} {pool:?}"));
        state.pools.retain(|entry| (entry.0, entry.1) != (device, pool));
    }
    fn release_pool(&self, device: i32, pool: PoolId) {
        let mut state = self.0.lock();
        state.log.push(format!("release_pool {device} {pool:?}"));
        let (over, resting) = std::mem::take(&mut state.resting)
            .into_iter()
            .partition(|(_, block)| (block.device, block.pool) == (device, Some(pool)));
        state.resting = resting;
        let over: Vec<(Address, Block)> = over;
        over.iter().for_each(|(at, block)| state.give_back(*at, block));
    }
    fn pool_blocks(&self, device: i32, pool: PoolId) -> Option<Vec<Address>> {
        let state = self.0.lock();
        let blocks = state.blocks.iter().filter(|(_, b)| b.device == device && b.pool == Some(pool));
        Some(blocks.map(|(at, _)| *at).collect())
    }
    fn checkpoint(&self, device: i32, pool: PoolId) -> Result<PoolState, Refusal> {
        let state = self.0.lock();
        let blocks = state.blocks.iter().filter(|(_, b)| b.device == device && b.pool == Some(pool));
        let mut kept: Kept = blocks.map(|(&at, block)| (at, block.clone())).collect();
        kept.sort_by_key(|(at, _)| *at);
        // Of a pool that nobody has used yet there is nothing to say.
        if kept.is_empty() {
            return Err(Refusal::Failed(format!("no blocks of {pool:?} on {device}")));
        }
        Ok(Box::new(Taken(kept)))
    }
    fn restore(&self, device: i32, state: &PoolState) -> Result<Restored, Refusal> {
        let kept = &state.downcast_ref::<Taken>().expect("a state of this service").0;
        if kept.iter().any(|(_, block)| block.device != device) {
            return Err(Refusal::Failed(format!("not of device {device}")));
        }
        let mut restored = Restored::default();
        let mut state = self.0.lock();
        let is_there =
            |at| state.blocks.contains_key(at) || state.resting.iter().any(|(other, _)| other == at);
        if !kept.iter().all(|(at, _)| is_there(at)) {
            return Err(Refusal::Failed("the pool was let go".into()));
        }
        let pool = kept[0].1.pool;
        let live = state.blocks.iter().filter(|(_, b)| b.device == device && b.pool == pool);
        let live: Kept = live.map(|(&at, block)| (at, block.clone())).collect();
        for (at, block) in live {
            state.account(&block, -1);
            restored.freed.push((at, block.size));
            state.blocks.remove(&at);
            state.resting.push((at, block));
        }
        for (at, block) in kept {
            state.resting.retain(|(other, _)| other != at);
            state.account(block, 1);
            restored.allocated.push((*at, block.size));
            state.blocks.insert(*at, block.clone());
        }
        Ok(restored)
    }
    fn stats(&self, device: i32) -> Option<Stats> {
        self.0.lock().stats.get(&device).copied()
    }
    fn totals(&self, device: i32) -> (u64, u64) {
        let stats = self.stats(device).unwrap_or_default();
        (stats.allocated_bytes[0].current as u64, stats.reserved_bytes[0].current as u64)
    }
    fn requested_size(&self, at: Address) -> Option<(u64, i32)> {
        self.0.lock().blocks.get(&at).map(|block| (block.size, block.device))
    }
    fn reset_peak(&self, device: i32) {
        if let Some(stats) = self.0.lock().stats.get_mut(&device) {
            stats.allocated_bytes[0].peak = stats.allocated_bytes[0].current;
        }
    }
    fn reset_accumulated(&self, device: i32) {
        if let Some(stats) = self.0.lock().stats.get_mut(&device) {
            stats.allocation[0].allocated = 0;
        }
    }
    fn snapshot(&self, pool: Option<PoolId>, traces: bool) -> Snapshot {
        let state = self.0.lock();
        let mut segments: Vec<SegmentInfo> = state
            .blocks
            .iter()
            .filter(|(_, block)| pool.is_none() || block.pool == pool)
            .map(|(&address, block)| SegmentInfo {
                device: block.device,
                address,
                total_size: block.room,
                allocated_size: block.room,
                active_size: block.room,
                requested_size: block.size,
                stream: block.stream.0,
                segment_type: if block.size > 1 << 20 { "large" } else { "small" },
                segment_pool_id: block.pool.map_or((0, 0), |pool| (pool.0, pool.1)),
                is_expandable: false,
                frames: vec![],
                blocks: vec![BlockInfo {
                    address,
                    size: block.room,
                    requested_size: block.size,
                    state: "active_allocated",
                    frames: vec![],
                }],
            })
            .collect();
        segments.sort_by_key(|segment| segment.address);
        let device_traces = vec![if traces { state.traces.clone() } else { vec![] }];
        Snapshot { segments, device_traces, ..Snapshot::default() }
    }
    fn enable_cache(&self, on: bool) {
        self.0.lock().log.push(format!("enable_cache {on}"));
    }
    fn record_history(&self, wish: &Wish) {
        let mut state = self.0.lock();
        state.history = wish.enabled;
        state.log.push(format!(
            "record_history {:?} native {} entries {}",
            wish.context, wish.native, wish.entries
        ));
    }
    fn enable_peer(&self, device: i32, peer: i32) -> Result<(), Refusal> {
        let mut state = self.0.lock();
        state.log.push(format!("enable_peer {device} {peer}"));
        let outcome = state.driver(device).and_then(|driver| driver.enable_peer(peer));
        outcome.map_err(|error| Refusal::Failed(error.to_string()))
    }
    fn copy_between(
        &self,
        to: (Address, i32),
        from: (Address, i32),
        size: u64,
        stream: Stream,
    ) -> Result<(), Refusal> {
        let mut state = self.0.lock();
        state.log.push(format!("copy_between {} {} {size}", from.1, to.1));
        let outcome =
            state.driver(to.1).and_then(|driver| driver.copy_between(to.0, from.0, from.1, size, stream));
        outcome.map_err(|error| Refusal::Failed(error.to_string()))
    }
    fn share(&self, at: Address) -> Result<Shared, Refusal> {
        let state = self.0.lock();
        let block = state.blocks.get(&at).ok_or(Refusal::Failed("no such block".into()))?;
        let exported = state.devices[&block.device].export(at, block.size);
        let exported = exported.map_err(|error| Refusal::Failed(error.to_string()))?;
        Ok(Shared { device: block.device, offset: exported.offset, pieces: exported.pieces })
    }
    fn open_shared(&self, device: i32, pieces: &[(i32, u64)]) -> Result<Address, Refusal> {
        let mut state = self.0.lock();
        let imported = state.driver(device).and_then(|driver| driver.import(pieces));
        let imported = imported.map_err(|error| Refusal::Failed(error.to_string()))?;
        let at = imported.at;
        state.log.push(format!("open_shared {device} {}", imported.size));
        state.imported.insert(at, (device, imported));
        Ok(at)
    }
    fn close_shared(&self, at: Address) {
        let mut state = self.0.lock();
        if let Some((device, imported)) = state.imported.remove(&at) {
            state.log.push("close_shared".into());
            let _ = state.devices[&device].forget(imported);
        }
    }
    fn observed(&self, at: Address, size: i64, device: i32, allocated: u64, reserved: u64) {
        let mut state = self.0.lock();
        state.log.push(format!("observed {} {size} {device} {allocated} {reserved}", at != 0));
    }
}

static SERVICE: Mutex<Option<&'static EachItsOwn>> = Mutex::new(None);

/// Puts the service behind torch's functions.
#[unsafe(no_mangle)]
pub extern "C" fn strandline_test_install() {
    // The panic that a test provokes is not to be read as a failure.
    std::panic::set_hook(Box::new(|_| {}));
    let service: &'static EachItsOwn = Box::leak(Box::new(EachItsOwn(Mutex::new(State::default()))));
    assert!(install(service));
    *SERVICE.lock() = Some(service);
}

/// Moves the log's lines into `buffer`, zero-terminated; as many as fit.
///
/// # Safety
/// `buffer` has room for `size` > 0 bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn strandline_test_log(buffer: *mut u8, size: usize) {
    let service = SERVICE.lock().expect("installed");
    let text = std::mem::take(&mut service.0.lock().log).join("\n");
    let length = text.len().min(size - 1);
    // SAFETY: as promised to this function.
    unsafe {
        buffer.copy_from_nonoverlapping(text.as_ptr(), length);
        buffer.add(length).write(0);
    }
}
