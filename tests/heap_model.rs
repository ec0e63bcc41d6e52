//! The heap against a model: random operations, every promise checked after each of them.
//!
//! The model knows only what was handed out. Promises: blocks do not overlap and are aligned; nothing is
//! handed out again before the events of the streams that use it; the statistics are exact; no page is lost;
//! the driver is never asked for something that makes no sense; a pool that is put back has what it had.

use std::collections::BTreeMap;

use proptest::prelude::*;
use strandline::driver::host::{BooksDriver, Options};
use strandline::driver::{Driver, Stream};
use strandline::heap::{Address, BlockInfo, BlockState, Checkpoint, Config, Heap, HeapError, PoolId, Tag};

const STREAMS: u64 = 3;

#[derive(Clone, Debug)]
enum Op {
    Malloc { size: u64, stream: u64 },
    Free { index: usize },
    Record { index: usize, stream: u64 },
    Submit { stream: u64 },
    Complete { stream: u64, count: u64 },
    Trim,
    Capture,
    EndCapture,
    Limit { megabytes: Option<u64> },
    RecordToPool,
    Checkpoint,
    Restore { index: usize },
}

fn sizes() -> impl Strategy<Value = u64> {
    prop_oneof![
        4 => 0..10_000u64,
        2 => 8_000..1_200_000u64,
        3 => 1_000_000..40_000_000u64,
        1 => 40_000_000..200_000_000u64,
    ]
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        10 => (sizes(), 0..STREAMS).prop_map(|(size, stream)| Op::Malloc { size, stream }),
        9 => any::<usize>().prop_map(|index| Op::Free { index }),
        3 => (any::<usize>(), 0..STREAMS).prop_map(|(index, stream)| Op::Record { index, stream }),
        4 => (0..STREAMS).prop_map(|stream| Op::Submit { stream }),
        4 => (0..STREAMS, 1..5u64).prop_map(|(stream, count)| Op::Complete { stream, count }),
        1 => Just(Op::Trim),
        1 => Just(Op::Capture),
        1 => Just(Op::EndCapture),
        1 => proptest::option::of(50..400u64).prop_map(|megabytes| Op::Limit { megabytes }),
        2 => Just(Op::RecordToPool),
        1 => Just(Op::Checkpoint),
        1 => any::<usize>().prop_map(|index| Op::Restore { index }),
    ]
}

/// What happens where most requests go to one pool, which is put back now and then.
fn pool_op() -> impl Strategy<Value = Op> {
    let small = prop_oneof![6 => 0..600u64, 6 => 0..66_000u64, 2 => sizes()];
    prop_oneof![
        24 => (small, 0..STREAMS).prop_map(|(size, stream)| Op::Malloc { size, stream }),
        12 => any::<usize>().prop_map(|index| Op::Free { index }),
        1 => (any::<usize>(), 0..STREAMS).prop_map(|(index, stream)| Op::Record { index, stream }),
        1 => (0..STREAMS).prop_map(|stream| Op::Submit { stream }),
        1 => (0..STREAMS, 1..5u64).prop_map(|(stream, count)| Op::Complete { stream, count }),
        1 => Just(Op::Trim),
        1 => Just(Op::RecordToPool),
        2 => Just(Op::Checkpoint),
        2 => any::<usize>().prop_map(|index| Op::Restore { index }),
    ]
}

/// A block of the model.
#[derive(Clone, Debug)]
struct Live {
    size: u64,
    stream: u64,
    tag: Tag,
    users: Vec<u64>,
    pooled: bool,
}

/// Freed, and forbidden until `stream` has completed `upto` pieces of work.
#[derive(Clone, Debug)]
struct Busy {
    from: Address,
    to: Address,
    stream: u64,
    upto: u64,
}

struct Model {
    driver: BooksDriver,
    heap: Heap<BooksDriver>,
    config: Config,
    live: BTreeMap<Address, Live>,
    busy: Vec<Busy>,
    sent: [u64; STREAMS as usize],
    next_tag: u64,
    capturing: bool,
    pools: u64,
    peak: u64,
    /// Requests on other streams than the captured one go to the pool that is held.
    recording: bool,
    checkpoints: Vec<(Checkpoint, BTreeMap<Address, Live>)>,
}

const CAPTURED: u64 = 2;
/// A pool that is held all the time.
const HELD: PoolId = PoolId(0, 1);

impl Model {
    fn new(memory: u64, virtual_memory: bool, config: Config) -> Self {
        let driver = BooksDriver::new(Options { memory, virtual_memory, ..Options::default() });
        let mut heap = Heap::new(driver.clone(), config.clone()).expect("a heap");
        heap.retain_pool(HELD);
        Model {
            driver,
            heap,
            config,
            live: BTreeMap::new(),
            busy: Vec::new(),
            sent: [0; STREAMS as usize],
            next_tag: 0,
            capturing: false,
            pools: 0,
            peak: 0,
            recording: false,
            checkpoints: Vec::new(),
        }
    }

    fn done(&self, stream: u64) -> u64 {
        self.sent[stream as usize] - self.driver.outstanding(Stream(stream))
    }

    fn pick(&self, index: usize) -> Option<Address> {
        let count = self.live.len();
        if count == 0 { None } else { self.live.keys().nth(index % count).copied() }
    }

    fn step(&mut self, op: &Op) {
        match *op {
            Op::Malloc { size, stream } => self.malloc(size, stream),
            Op::Free { index } => self.free(index),
            Op::Record { index, stream } => {
                if let Some(at) = self.pick(index) {
                    self.heap.record_stream(at, Stream(stream)).expect("a live block");
                    let live = self.live.get_mut(&at).expect("live");
                    if live.stream != stream && !live.users.contains(&stream) {
                        live.users.push(stream);
                    }
                }
            }
            // Work that is captured is not run.
            Op::Submit { stream } if !(self.capturing && stream == CAPTURED) => {
                self.driver.submit(Stream(stream));
                self.sent[stream as usize] += 1;
            }
            Op::Submit { .. } => {}
            Op::Complete { stream, count } => {
                self.driver.complete(Stream(stream), count);
            }
            Op::Trim => {
                let before = self.heap.reserved();
                let given = self.heap.trim();
                assert_eq!(before - self.heap.reserved(), given);
            }
            Op::Capture if !self.capturing => {
                self.pools += 1;
                let filter = |stream| stream == Stream(CAPTURED);
                self.heap.begin_pool(PoolId(self.pools, 0), Box::new(filter)).expect("a new pool");
                self.driver.synchronize();
                self.driver.begin_capture(Stream(CAPTURED));
                self.capturing = true;
            }
            Op::EndCapture if self.capturing => {
                self.driver.end_capture(Stream(CAPTURED));
                self.heap.end_pool(PoolId(self.pools, 0)).expect("the pool");
                self.heap.release_pool(PoolId(self.pools, 0)).expect("the pool");
                self.capturing = false;
            }
            Op::Capture | Op::EndCapture => {}
            Op::RecordToPool if self.recording => {
                self.heap.end_pool(HELD).expect("the pool");
                self.heap.release_pool(HELD).expect("the pool");
                self.recording = false;
            }
            Op::RecordToPool => {
                self.heap.begin_pool(HELD, Box::new(|stream| stream != Stream(CAPTURED))).expect("the pool");
                self.recording = true;
            }
            Op::Checkpoint => {
                let checkpoint = self.heap.checkpoint(HELD).expect("a pool that is held");
                let pooled = self.live.iter().filter(|(_, live)| live.pooled);
                self.checkpoints.push((checkpoint, pooled.map(|(&at, live)| (at, live.clone())).collect()));
            }
            Op::Restore { index } => self.restore(index),
            Op::Limit { megabytes } => self.heap.set_limit(megabytes.map(|megabytes| megabytes << 20)),
        }
        self.check();
    }

    fn malloc(&mut self, size: u64, stream: u64) {
        let tag = Tag(self.next_tag, !self.next_tag);
        self.next_tag += 1;
        let at = match self.heap.malloc(size, Stream(stream), tag) {
            Ok(at) => at,
            Err(HeapError::OutOfMemory { requested, .. }) => {
                assert_eq!(requested, size);
                return;
            }
            Err(other) => panic!("{other}"),
        };
        assert_eq!(at % self.config.minimum, 0, "alignment");
        assert!(self.driver.is_mapped(at) && self.driver.is_mapped(at + size.max(1) - 1), "memory behind it");
        let end = at + size.max(1);
        if let Some((&other, live)) = self.live.range(..end).next_back() {
            assert!(other + live.size.max(1) <= at, "overlaps {other:#x}");
        }
        for busy in &self.busy {
            let over = busy.from < end && at < busy.to;
            // A stream may have its own memory back while it still works on it; another's only if it
            // has been made to wait for that work, so that nothing it is sent now is done before.
            if over && busy.stream != stream && self.done(busy.stream) < busy.upto {
                let event = self.driver.record_event(Stream(stream)).expect("an event");
                let done = self.driver.query_event(event).expect("an answer");
                self.driver.release_event(event).expect("an event");
                assert!(!done, "{at:#x} on {stream} while {busy:?}");
            }
        }
        let pooled = self.recording && stream != CAPTURED;
        self.live.insert(at, Live { size, stream, tag, users: Vec::new(), pooled });
    }

    fn restore(&mut self, index: usize) {
        if self.checkpoints.is_empty() {
            return;
        }
        let (checkpoint, then) = self.checkpoints[index % self.checkpoints.len()].clone();
        let restored = match self.heap.restore(&checkpoint) {
            Ok(restored) => restored,
            Err(error) => {
                // A recording whose first request has not come may be a capture, too.
                assert!(self.capturing || self.recording, "{error}");
                return assert!(error.to_string().contains("during a capture"), "{error}");
            }
        };
        let (pooled, others) = std::mem::take(&mut self.live).into_iter().partition(|(_, live)| live.pooled);
        let pooled: BTreeMap<Address, Live> = pooled;
        let told = |blocks: &[BlockInfo]| -> Vec<_> {
            let all = blocks.iter().map(|block| (block.address, block.requested, block.stream, block.tag));
            all.collect()
        };
        let known = |blocks: &BTreeMap<Address, Live>| -> Vec<_> {
            blocks.iter().map(|(&at, live)| (at, live.size, Stream(live.stream), live.tag)).collect()
        };
        assert_eq!(told(&restored.freed), known(&pooled));
        assert_eq!(told(&restored.allocated), known(&then));
        self.live = others;
        // The pool's other users were waited for; the streams that the blocks belong to were not.
        for (&at, live) in &pooled {
            let (stream, to) = (live.stream, at + live.size.max(1));
            self.busy.push(Busy { from: at, to, stream, upto: self.sent[stream as usize] });
        }
        for (&at, live) in &then {
            let end = at + live.size.max(1);
            assert!(self.driver.is_mapped(at) && self.driver.is_mapped(end - 1), "memory behind it");
            let over = |busy: &&Busy| busy.from < end && at < busy.to && busy.stream != live.stream;
            if let Some(busy) = self.busy.iter().filter(over).find(|busy| self.done(busy.stream) < busy.upto)
            {
                panic!("{at:#x} is put back while {busy:?}");
            }
        }
        self.live.extend(then);
    }

    fn free(&mut self, index: usize) {
        let Some(at) = self.pick(index) else { return };
        let live = self.live.remove(&at).expect("live");
        let freed = self.heap.free(at).expect("a live block");
        assert_eq!((freed.requested, freed.stream, freed.tag), (live.size, Stream(live.stream), live.tag));
        assert!(freed.size >= live.size);
        assert!(self.heap.free(at).is_err(), "freed twice");
        for stream in live.users.into_iter().chain([live.stream]) {
            let upto = self.sent[stream as usize];
            self.busy.push(Busy { from: at, to: at + live.size.max(1), stream, upto });
        }
    }

    fn check(&mut self) {
        if let Err(error) = self.heap.check() {
            panic!("{error}");
        }
        let done: Vec<u64> = (0..STREAMS).map(|stream| self.done(stream)).collect();
        self.busy.retain(|busy| done[busy.stream as usize] < busy.upto);
        assert_eq!(self.driver.violations(), 0, "calls that make no sense");
        let stats = self.heap.stats();
        let requested: u64 = self.live.values().map(|live| live.size).sum();
        assert_eq!(stats.allocation.all.current, self.live.len() as u64);
        assert!(stats.requested_bytes.all.current >= requested);
        self.peak = self.peak.max(stats.reserved_bytes.all.current);
        assert_eq!(stats.reserved_bytes.all.peak, self.peak.max(stats.reserved_bytes.all.peak));
        assert_eq!(stats.reserved_bytes.all.current, self.driver.mapped());
        assert_eq!(self.driver.created(), self.driver.mapped(), "no page is lost");
        let mut seen = 0;
        self.heap.for_each_live(|block| {
            if block.state == BlockState::Allocated {
                assert_eq!(self.live.get(&block.address).map(|live| live.tag), Some(block.tag));
                seen += 1;
            }
        });
        assert_eq!(seen, self.live.len());
    }

    fn finish(mut self) {
        if self.capturing {
            self.step(&Op::EndCapture);
        }
        if self.recording {
            self.step(&Op::RecordToPool);
        }
        self.heap.release_pool(HELD).expect("the pool");
        while !self.live.is_empty() {
            self.free(0);
        }
        self.driver.synchronize();
        self.heap.trim();
        self.check();
        assert_eq!((self.heap.reserved(), self.driver.created()), (0, 0), "everything comes back");
        let driver = self.driver.clone();
        drop(self.heap);
        assert_eq!((driver.reservations(), driver.events()), (0, 0));
    }
}

trait Synchronize {
    fn synchronize(&self);
}

impl Synchronize for BooksDriver {
    /// Completes all work of all streams.
    fn synchronize(&self) {
        for _ in 0..STREAMS {
            for stream in 0..STREAMS {
                self.complete(Stream(stream), u64::MAX);
            }
        }
    }
}

/// A case is a whole life of a heap, so there are fewer than proptest's 256 unless more are asked for.
fn cases() -> u32 {
    std::env::var("PROPTEST_CASES").map_or(48, |cases| cases.parse().expect("PROPTEST_CASES is a number"))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(), failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn keeps_its_promises(ops in proptest::collection::vec(op(), 1..250)) {
        let mut model = Model::new(700 << 20, true, Config::lean());
        ops.iter().for_each(|op| model.step(op));
        model.finish();
    }

    #[test]
    fn keeps_them_with_the_settings_of_jobs(ops in proptest::collection::vec(op(), 1..250)) {
        let mut model = Model::new(700 << 20, true, Config::speed());
        ops.iter().for_each(|op| model.step(op));
        model.finish();
    }

    #[test]
    fn keeps_them_with_host_sizes_and_no_slack(ops in proptest::collection::vec(op(), 1..250)) {
        let config = Config { slack: 0, slack_before_wait: 0, ..Config::host() };
        let mut model = Model::new(500 << 20, true, config);
        ops.iter().for_each(|op| model.step(op));
        model.finish();
    }

    #[test]
    fn puts_pools_back(ops in proptest::collection::vec(pool_op(), 1..400), virtual_memory in any::<bool>()) {
        let mut model = Model::new(700 << 20, virtual_memory, Config::lean());
        model.step(&Op::RecordToPool);
        ops.iter().for_each(|op| model.step(op));
        model.finish();
    }

    #[test]
    fn keeps_them_without_virtual_memory(ops in proptest::collection::vec(op(), 1..250)) {
        let mut model = Model::new(700 << 20, false, Config::lean());
        ops.iter().for_each(|op| model.step(op));
        model.finish();
    }
}
