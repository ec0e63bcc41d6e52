//! Guard mode over one GPU's memory: kernels write the patterns and look at them, in the order of the block's stream.
//!
//! A block is handed out [`FRONT`] bytes behind the heap's address, so that the address identifies who surrounded it.
//! What happens to it, each a launch on its own stream that nobody waits for:
//!
//! ```text
//! malloc ─▶ the patterns are written
//! free   ─▶ they are looked at, and the block is poisoned ─▶ held back ─▶ the poison is looked at ─▶ the heap's free
//!       └─▶ waits first for the other streams that use it, or for the end of a graph capture
//! ```
//!
//! Nothing is launched on a stream that captures, nor while a pool is recorded to: blocks that are handed out then have
//! no patterns (a graph would repeat the launch at each replay), and blocks that are freed then are looked at later.
//! Nothing is launched for each thread's own default stream either, whose handle means another one elsewhere.
//! Invariants: nothing waits for the device, except the end of the run, and that not for long, and a program's own
//! `cudaMalloc` ([`DeviceGuard::settle_legacy`]); so few launches are in flight on a stream that the guard's alone never
//! fill the driver's queue, where the next one would be held up with the lock; freed memory that waits or is held back
//! is bounded and given up before a request is refused; a launch that fails ends the guarding, not the job, and if only
//! the stream is gone, that of its blocks. Locks: a guard's own comes before its device's.

mod last;

use super::checks::{Check, Checks, Looked, is_handle_gone};
use super::skipped::Skipped;
use super::{Block, Changed, Faults, PATTERN, POISON, Wrong};
use crate::attach::served::{Served, patience};
use crate::attach::{gpu, say};
use crate::driver::cuda::{CudaDriver, Edges, Findings, GuardKernels};
use crate::driver::{Address, Driver, DriverError, Event, Stream};
use crate::heap::HeapError;
use crate::ledger::Clock;
use crate::stacks::StackId;
use parking_lot::Mutex;
use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};

/// Bytes of pattern before and behind each block: a warp's stores of 16 bytes to the wrong side of a border.
/// A multiple of every alignment that the heap gives.
pub const FRONT: u64 = 512;
pub const REAR: u64 = 512;
/// Freed memory that is held back: this part of the device's, and at most so many bytes and blocks.
const HELD_PART: u64 = 16;
const HELD_BYTES: u64 = 4 << 30;
const HELD_BLOCKS: usize = 1 << 16;
/// Launches whose findings may be outstanding; more than a device's queues take.
const SLOTS: u32 = 1 << 14;
/// Calls between two looks at what is done.
const POLL: u32 = 16;
/// Blocks that wait for other streams and are asked after in one look.
const LOOKS: usize = 32;
/// `CU_STREAM_PER_THREAD`.
const PER_THREAD: Stream = Stream(2);

type Driven = Served<CudaDriver>;

/// A block with patterns around it that is handed out.
struct Live {
    size: u64,
    stream: Stream,
    born: u32,
    /// Other streams that use it. The heap learns of them only if it gets the block before they are done.
    uses: Vec<Stream>,
    number: u64,
}

/// A freed block.
#[derive(Clone, Copy)]
struct Held {
    block: Block,
    stream: Stream,
    /// Each handed out block's own; of blocks that are held back, in the order in which they came.
    number: u64,
}

/// A freed block that nobody has looked at yet.
struct Waiting {
    held: Held,
    /// Streams whose event is still to be recorded, and events that are not known to be done.
    uses: Vec<Stream>,
    events: Vec<(Stream, Event)>,
}

struct Inner {
    /// By the user's address.
    live: HashMap<Address, Live>,
    held: VecDeque<Held>,
    held_bytes: u64,
    waiting: VecDeque<Waiting>,
    waiting_bytes: u64,
    numbers: u64,
    checks: Checks,
    /// What is to be said once the lock is given up.
    found: Vec<(Wrong, Block, Changed)>,
    until_poll: u32,
    /// Something was found: findings are asked for at each call until they are in.
    urgent: bool,
    /// The run is over: no stream waits for its batch to fill.
    last: bool,
    skipped: Skipped,
}

/// The guard of one GPU.
pub struct DeviceGuard {
    device: i32,
    driver: CudaDriver,
    kernels: GuardKernels,
    budget: u64,
    /// A launch failed, or the run is over: nothing is launched any more.
    over: AtomicBool,
    inner: Mutex<Inner>,
}

fn base_of(at: Address) -> Address {
    at - FRONT
}

fn edges(block: &Block) -> Edges {
    Edges { at: block.at, size: block.size, front: FRONT, rear: REAR, pattern: PATTERN }
}

impl DeviceGuard {
    /// Makes the kernels ready on a device with `total` bytes.
    ///
    /// # Errors
    /// The driver's.
    pub fn new(device: i32, driver: CudaDriver, total: u64) -> Result<Self, DriverError> {
        let kernels = GuardKernels::load(&driver, SLOTS)?;
        let inner = Inner {
            live: HashMap::new(),
            held: VecDeque::new(),
            held_bytes: 0,
            waiting: VecDeque::new(),
            waiting_bytes: 0,
            numbers: 0,
            checks: Checks::new(kernels.slots()),
            found: Vec::new(),
            until_poll: POLL,
            urgent: false,
            last: false,
            skipped: Skipped::default(),
        };
        let budget = (total / HELD_PART).min(HELD_BYTES);
        let (over, inner) = (AtomicBool::new(false), Mutex::new(inner));
        Ok(DeviceGuard { device, driver, kernels, budget, over, inner })
    }

    fn is_over(&self) -> bool {
        self.over.load(Ordering::Relaxed)
    }

    /// Whether nothing may be launched on the stream just now.
    fn is_closed(&self, served: &Driven, stream: Stream) -> bool {
        stream == PER_THREAD
            || served.lock().heap.is_recording()
            || self.driver.is_capturing(stream).unwrap_or(true)
    }

    /// Whether a launch is sure not to be held up by those of ours before it.
    fn has_room(&self, inner: &mut Inner, stream: Stream) -> bool {
        if !inner.checks.has_room(stream)
            && let Err(error) = self.read(inner)
        {
            self.end(&error);
        }
        inner.checks.has_room(stream)
    }

    /// Hands out a block with patterns around it.
    ///
    /// # Errors
    /// The heap's.
    pub fn malloc(
        &self,
        served: &Driven,
        size: u64,
        stream: Stream,
        stack: StackId,
        clock: &Clock,
        faults: &Faults,
    ) -> Result<Address, HeapError> {
        self.look(served, faults);
        if self.is_over() {
            return served.malloc(size, stream, stack, clock);
        }
        let closed = self.is_closed(served, stream);
        let full = !closed && !self.has_room(&mut self.inner.lock(), stream);
        let around = if closed || full { (0, 0) } else { (FRONT, REAR) };
        let base = match served.malloc_within(size, around, stream, stack, clock) {
            Err(HeapError::OutOfMemory { .. }) if self.make_room(served) => {
                served.malloc_within(size, around, stream, stack, clock)
            }
            done => done,
        }?;
        if closed || full {
            let skipped = &mut self.inner.lock().skipped;
            let why = match closed {
                false => &mut skipped.full,
                true if stream == PER_THREAD => &mut skipped.per_thread,
                true => &mut skipped.captured,
            };
            *why += 1;
            return Ok(base);
        }
        let block = Block { at: base + FRONT, size, born: stack.0, freed: 0 };
        // Before the block can be freed by anybody: until this returns nobody else knows it.
        let armed = self.kernels.arm(stream, &edges(&block));
        let mut inner = self.inner.lock();
        let armed = armed.and_then(|()| inner.checks.launched(&self.driver, stream, None));
        if let Err(error) = armed {
            self.failed(&mut inner, stream, &error);
        }
        inner.numbers += 1;
        let live = Live { size, stream, born: stack.0, uses: Vec::new(), number: inner.numbers };
        inner.live.insert(block.at, live);
        Ok(block.at)
    }

    /// Takes a block back; `None` if it has no patterns around it.
    ///
    /// # Errors
    /// The heap's.
    pub fn free(
        &self,
        served: &Driven,
        at: Address,
        clock: &Clock,
        faults: &Faults,
    ) -> Option<Result<(), HeapError>> {
        let freed = gpu::stack();
        let mut inner = self.inner.lock();
        let Some(live) = inner.live.remove(&at) else {
            if served.lock().heap.tag_mut(at).is_ok() {
                return None;
            }
            let twice = inner.freed_at(at)?;
            drop(inner);
            faults.add(self.device, Wrong::FreedTwice, twice, Changed::default(), freed);
            return Some(Ok(()));
        };
        let block = Block { at, size: live.size, born: live.born, freed: freed.0 };
        let held = Held { block, stream: live.stream, number: live.number };
        if let Err(error) = served.retire(base_of(at), at, live.size, live.stream, clock) {
            return Some(Err(error));
        }
        let done = if self.is_over() {
            hand_over(served, &held, &live.uses)
        } else if !live.uses.is_empty()
            || self.is_closed(served, live.stream)
            || !self.has_room(&mut inner, live.stream)
        {
            self.wait_for(&mut inner, served, held, live.uses);
            Ok(())
        } else {
            self.retire(&mut inner, served, held)
        };
        drop(inner);
        self.look(served, faults);
        Some(done)
    }

    /// Notes that another stream uses the block; `false` if it has no patterns around it.
    pub fn record_stream(&self, at: Address, stream: Stream) -> bool {
        let mut inner = self.inner.lock();
        let Some(live) = inner.live.get_mut(&at) else { return false };
        if stream != live.stream && !live.uses.contains(&stream) {
            live.uses.push(stream);
        }
        true
    }

    /// The size that was requested of the block at `at`, if it has patterns around it.
    pub fn size_of(&self, at: Address) -> Option<u64> {
        self.inner.lock().live.get(&at).map(|live| live.size)
    }

    /// Waits for the launches of the legacy stream, for callers who use a block in no stream's order.
    pub fn settle_legacy(&self, served: &Driven) {
        if !self.is_over() && !self.is_closed(served, Stream(0)) {
            let _said_by_the_next_launch = self.driver.synchronize_stream(Stream(0));
        }
    }

    /// A freed block has to wait for other streams, or for the end of a capture.
    fn wait_for(&self, inner: &mut Inner, served: &Driven, held: Held, uses: Vec<Stream>) {
        let mut waiting = Waiting { held, uses, events: Vec::new() };
        // What the other streams get to do from now on is no use of the block.
        if !served.lock().heap.is_recording()
            && let Err(error) = self.is_ready(&mut waiting)
        {
            self.end(&error);
        }
        inner.waiting_bytes += held.block.size;
        inner.waiting.push_back(waiting);
        self.shrink(inner, served);
    }

    /// Looks at a freed block's patterns, poisons it and holds it back.
    fn retire(&self, inner: &mut Inner, served: &Driven, mut held: Held) -> Result<(), HeapError> {
        // A block that would push out all others is not worth holding back.
        let keep = held.block.size <= self.budget / 2;
        let poisoned = if keep { held.block.size } else { 0 };
        let looked = self.launch(inner, held, Looked::Edges, |slot| {
            self.kernels.retire(held.stream, &edges(&held.block), poisoned, POISON, slot)
        });
        if !keep {
            inner.skipped.large += 1;
        }
        if !keep || !looked {
            return hand_over(served, &held, &[]);
        }
        inner.numbers += 1;
        held.number = inner.numbers;
        inner.held_bytes += held.block.size;
        inner.held.push_back(held);
        self.shrink(inner, served);
        Ok(())
    }

    /// Gives the heap the oldest blocks while there are too many.
    fn shrink(&self, inner: &mut Inner, served: &Driven) {
        while inner.held_bytes + inner.waiting_bytes > self.budget
            || inner.held.len() + inner.waiting.len() > HELD_BLOCKS
        {
            if let Some(oldest) = inner.held.pop_front() {
                inner.held_bytes -= oldest.block.size;
                self.let_one_go(inner, served, oldest);
            } else if let Some(oldest) = inner.waiting.pop_front() {
                self.give_up_waiting(inner, served, oldest);
            } else {
                return;
            }
        }
    }

    /// Looks at a block that was held back, if that can be done now, and gives it to the heap.
    fn let_one_go(&self, inner: &mut Inner, served: &Driven, held: Held) {
        if !self.is_over() {
            if self.is_closed(served, held.stream) {
                inner.skipped.late += 1;
            } else {
                self.look_at_poison(inner, held);
            }
        }
        let _stays_where_it_is = hand_over(served, &held, &[]);
    }

    /// Gives the heap a block that is still waited for; of those streams the heap is told.
    fn give_up_waiting(&self, inner: &mut Inner, served: &Driven, waiting: Waiting) {
        inner.skipped.busy += 1;
        inner.waiting_bytes -= waiting.held.block.size;
        let mut uses = waiting.uses;
        for (stream, event) in waiting.events {
            if !self.driver.query_event(event).unwrap_or(false) {
                uses.push(stream);
            }
            self.release(event);
        }
        let _stays_where_it_is = hand_over(served, &waiting.held, &uses);
    }

    fn look_at_poison(&self, inner: &mut Inner, held: Held) -> bool {
        self.launch(inner, held, Looked::Poison, |slot| {
            self.kernels.look(held.stream, held.block.at, held.block.size, POISON, slot)
        })
    }

    /// Launches a kernel that leaves what it finds in a slot; `false` if that could not be done.
    fn launch(
        &self,
        inner: &mut Inner,
        held: Held,
        looked: Looked,
        run: impl FnOnce(u32) -> Result<(), DriverError>,
    ) -> bool {
        if self.is_over() {
            return false;
        }
        let room = self.has_room(inner, held.stream);
        let Some(slot) = room.then(|| inner.checks.borrow()).flatten() else {
            inner.skipped.busy += 1;
            inner.urgent = true;
            return false;
        };
        if let Err(error) = run(slot) {
            inner.checks.give_back(slot);
            self.failed(inner, held.stream, &error);
            return false;
        }
        let check = Check { slot, looked, block: held.block };
        if let Err(error) = inner.checks.launched(&self.driver, held.stream, Some(check)) {
            self.failed(inner, held.stream, &error);
        }
        true
    }

    /// Gives the heap what is held back and was looked at: somebody wants the memory.
    pub fn let_go(&self, served: &Driven) {
        let mut inner = self.inner.lock();
        self.poll(&mut inner, served);
        self.give_up_held(&mut inner, served);
    }

    /// Gives the heap everything; `false` if there was nothing.
    fn make_room(&self, served: &Driven) -> bool {
        let mut inner = self.inner.lock();
        let any = !inner.held.is_empty() || !inner.waiting.is_empty();
        self.give_up(&mut inner, served);
        any
    }

    fn give_up_held(&self, inner: &mut Inner, served: &Driven) {
        inner.held_bytes = 0;
        for held in std::mem::take(&mut inner.held) {
            self.let_one_go(inner, served, held);
        }
    }

    fn give_up(&self, inner: &mut Inner, served: &Driven) {
        self.give_up_held(inner, served);
        for waiting in std::mem::take(&mut inner.waiting) {
            self.give_up_waiting(inner, served, waiting);
        }
    }

    /// Looks, now and then, at what is done; says what was found.
    pub fn look(&self, served: &Driven, faults: &Faults) {
        let mut inner = self.inner.lock();
        inner.until_poll -= 1;
        if inner.until_poll == 0 || inner.urgent || self.kernels.is_alarmed() {
            self.poll(&mut inner, served);
        }
        self.tell(inner, faults);
    }

    /// The same at once, if the lock is to be had in time: a step ended, or a report is written.
    pub fn look_now(&self, served: &Driven, faults: &Faults) {
        if let Some(mut inner) = self.inner.try_lock_for(patience()) {
            self.poll(&mut inner, served);
            self.tell(inner, faults);
        }
    }

    fn tell(&self, mut inner: parking_lot::MutexGuard<'_, Inner>, faults: &Faults) {
        let found = std::mem::take(&mut inner.found);
        drop(inner);
        for (wrong, block, changed) in found {
            faults.add(self.device, wrong, block, changed, StackId::NONE);
        }
    }

    fn poll(&self, inner: &mut Inner, served: &Driven) {
        inner.until_poll = POLL;
        if self.is_over() {
            return self.give_up(inner, served);
        }
        if served.lock().heap.is_recording() {
            return;
        }
        self.look_at_waiting(inner, served);
        let alarmed = self.kernels.take_alarm();
        inner.urgent |= alarmed;
        if let Err(error) = self.collect(inner, served, alarmed) {
            self.end(&error);
        }
        inner.urgent &= inner.checks.waits();
    }

    fn collect(&self, inner: &mut Inner, served: &Driven, seal: bool) -> Result<(), DriverError> {
        let all = seal || inner.urgent && !inner.checks.waits();
        if all || inner.last {
            inner.checks.seal(&self.driver, all, |stream| self.is_closed(served, stream))?;
        }
        self.read(inner)
    }

    /// Reads what is found by launches that are done.
    fn read(&self, inner: &mut Inner) -> Result<(), DriverError> {
        for check in inner.checks.done(&self.driver)? {
            let findings = self.kernels.findings(check.slot);
            inner.checks.give_back(check.slot);
            inner.examine(&check, findings);
        }
        Ok(())
    }

    /// Goes on with blocks that waited for other streams, or for the end of a capture.
    fn look_at_waiting(&self, inner: &mut Inner, served: &Driven) {
        for _ in 0..LOOKS.min(inner.waiting.len()) {
            let Some(mut waiting) = inner.waiting.pop_front() else { return };
            let stream = waiting.held.stream;
            match self.is_ready(&mut waiting) {
                Ok(true) if !self.is_closed(served, stream) && self.has_room(inner, stream) => {
                    inner.waiting_bytes -= waiting.held.block.size;
                    let _stays_where_it_is = self.retire(inner, served, waiting.held);
                }
                Ok(_) => inner.waiting.push_back(waiting),
                Err(error) => {
                    inner.waiting.push_back(waiting);
                    return self.end(&error);
                }
            }
        }
    }

    /// Whether every other stream is done with the block.
    fn is_ready(&self, waiting: &mut Waiting) -> Result<bool, DriverError> {
        while let Some(&stream) = waiting.uses.last() {
            let event = self.driver.is_capturing(stream).and_then(|captures| match captures {
                true => Ok(None),
                false => self.driver.record_event(stream).map(Some),
            });
            match event {
                Ok(None) => return Ok(false),
                Ok(Some(event)) => waiting.events.push((stream, event)),
                // Who ends a stream is done with it.
                Err(error) if is_handle_gone(&error) => {}
                Err(error) => return Err(error),
            }
            waiting.uses.pop();
        }
        while let Some(&(_, event)) = waiting.events.last() {
            if !self.driver.query_event(event)? {
                return Ok(false);
            }
            waiting.events.pop();
            self.release(event);
        }
        Ok(true)
    }

    fn release(&self, event: Event) {
        let _leaked_on_error = self.driver.release_event(event);
    }

    /// A launch failed on a stream: if that is gone, only its blocks are not looked at.
    #[cold]
    fn failed(&self, inner: &mut Inner, stream: Stream, error: &DriverError) {
        if is_handle_gone(error) {
            inner.checks.forget(stream);
            inner.skipped.late += 1;
        } else {
            self.end(error);
        }
    }

    /// Launches fail: the job goes on without the guard.
    #[cold]
    fn end(&self, error: &DriverError) {
        // As the process exits the driver goes first.
        if !self.over.swap(true, Ordering::Relaxed) && !CudaDriver::is_gone(error) {
            say(format_args!(
                "guard mode ends on GPU {}: {}. The job goes on without it, and will most likely meet the same error",
                self.device,
                CudaDriver::describe(error)
            ));
        }
    }
}

/// Gives the heap a block, which other streams may still use.
fn hand_over(served: &Driven, held: &Held, uses: &[Stream]) -> Result<(), HeapError> {
    let mut books = served.lock();
    for &stream in uses {
        books.heap.record_stream(base_of(held.block.at), stream)?;
    }
    books.heap.free(base_of(held.block.at)).map(drop)
}

impl Inner {
    /// The freed block that begins at `at` and is still held back.
    fn freed_at(&self, at: Address) -> Option<Block> {
        let waiting = self.waiting.iter().map(|waiting| waiting.held);
        waiting.chain(self.held.iter().rev().copied()).map(|held| held.block).find(|block| block.at == at)
    }

    fn examine(&mut self, check: &Check, found: Findings) {
        let block = check.block;
        let mut add = |wrong, first: i64, count| {
            if count > 0 {
                self.found.push((wrong, block, Changed { first, count }));
            }
        };
        match check.looked {
            Looked::Edges => {
                add(
                    Wrong::Underflow,
                    (found.front.first as i64).wrapping_sub(FRONT as i64),
                    found.front.count,
                );
                add(
                    Wrong::Overflow,
                    (found.rear.first as i64).wrapping_add(block.size as i64),
                    found.rear.count,
                );
            }
            Looked::Poison => add(Wrong::UseAfterFree, found.body.first as i64, found.body.count),
        }
    }
}
