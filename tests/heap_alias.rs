//! Memory that is mapped at several addresses at once: who may use it, and when an address is unmapped.
//!
//! A driver in between knows which physical bytes lie at an address. It checks what no statistics show: two
//! live blocks never share a byte of physical memory, whatever their addresses; bytes go from one stream to
//! another only when the first is done with them; no address is unmapped while work may still use it.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use strandline::driver::host::{AliasingDriver, BooksDriver, Call, Options};
use strandline::driver::{Driver, DriverError, Event, Handle, MemoryInfo, Result, Stream};
use strandline::heap::{Address, Config, Heap, HeapError, Tag};

const MIB: u64 = 1 << 20;
const STREAMS: u64 = 2;

/// What the driver in between knows.
#[derive(Default)]
struct Seen {
    mapped: BTreeMap<Address, (u64, Handle)>,
    /// Freed ranges: physical and virtual begin, size, stream, and the work that must be done before.
    busy: Vec<Busy>,
    sent: [u64; STREAMS as usize],
    aliases: u64,
    /// What was sent to its stream before an event.
    events: BTreeMap<u64, Vec<(u64, u64)>>,
}

#[derive(Clone, Debug)]
struct Busy {
    bytes: Vec<(Handle, u64, u64)>,
    at: Address,
    size: u64,
    stream: u64,
    upto: u64,
    /// Streams that were made to wait for it.
    waiting: Vec<u64>,
}

#[derive(Clone)]
struct Watched {
    inner: BooksDriver,
    seen: Arc<Mutex<Seen>>,
}

impl Watched {
    fn new(memory: u64) -> Self {
        Watched { inner: BooksDriver::with_memory(memory), seen: Arc::default() }
    }

    fn submit(&self, stream: u64) {
        self.inner.submit(Stream(stream));
        self.seen.lock().unwrap().sent[stream as usize] += 1;
    }

    fn done(&self, seen: &Seen, stream: u64) -> u64 {
        seen.sent[stream as usize] - self.inner.outstanding(Stream(stream))
    }

    /// The physical bytes of a block: handle, offset and size of each part.
    fn bytes(seen: &Seen, at: Address, size: u64) -> Vec<(Handle, u64, u64)> {
        let (mut from, to) = (at, at + size);
        let mut bytes = Vec::new();
        while from < to {
            let (&base, &(len, handle)) = seen.mapped.range(..=from).next_back().expect("mapped memory");
            assert!(from < base + len, "{from:#x} is not mapped");
            let end = to.min(base + len);
            bytes.push((handle, from - base, end - from));
            from = end;
        }
        bytes
    }

    fn forget_done(&self) {
        let seen = &mut *self.seen.lock().unwrap();
        let done: Vec<u64> = (0..STREAMS).map(|stream| self.done(seen, stream)).collect();
        seen.busy.retain(|busy| busy.upto > done[busy.stream as usize]);
    }
}

fn overlap(a: &[(Handle, u64, u64)], b: &[(Handle, u64, u64)]) -> bool {
    a.iter().any(|a| b.iter().any(|b| a.0 == b.0 && a.1 < b.1 + b.2 && b.1 < a.1 + a.2))
}

impl Driver for Watched {
    fn has_virtual_memory(&self) -> bool {
        true
    }
    fn granularity(&self) -> u64 {
        self.inner.granularity()
    }
    fn has_aliases(&self) -> bool {
        self.inner.has_aliases()
    }
    fn memory_info(&self) -> Result<MemoryInfo> {
        self.inner.memory_info()
    }
    fn reserve(&self, size: u64) -> Result<Address> {
        self.inner.reserve(size)
    }
    fn unreserve(&self, at: Address, size: u64) -> Result<()> {
        self.inner.unreserve(at, size)
    }
    fn create(&self, size: u64) -> Result<Handle> {
        self.inner.create(size)
    }
    fn destroy(&self, handle: Handle) -> Result<()> {
        self.inner.destroy(handle)?;
        let seen = &mut *self.seen.lock().unwrap();
        assert!(seen.mapped.values().all(|&(_, other)| other != handle), "destroyed while mapped");
        Ok(())
    }
    fn map(&self, at: Address, size: u64, handle: Handle) -> Result<()> {
        self.inner.map(at, size, handle)?;
        let seen = &mut *self.seen.lock().unwrap();
        seen.aliases += u64::from(seen.mapped.values().any(|&(_, other)| other == handle));
        seen.mapped.insert(at, (size, handle));
        Ok(())
    }
    fn unmap(&self, at: Address, size: u64) -> Result<()> {
        self.forget_done();
        self.inner.unmap(at, size)?;
        let seen = &mut *self.seen.lock().unwrap();
        let used = seen.busy.iter().find(|busy| busy.at < at + size && at < busy.at + busy.size);
        assert!(used.is_none(), "{at:#x} is unmapped while work may use it: {used:?}");
        seen.mapped.remove(&at);
        Ok(())
    }
    fn allocate(&self, size: u64) -> Result<Address> {
        self.inner.allocate(size)
    }
    fn deallocate(&self, at: Address, size: u64) -> Result<()> {
        self.inner.deallocate(at, size)
    }
    fn record_event(&self, stream: Stream) -> Result<Event> {
        let event = self.inner.record_event(stream)?;
        let seen = &mut *self.seen.lock().unwrap();
        let sent = seen.sent.get(stream.0 as usize).copied().unwrap_or(0);
        seen.events.insert(event.0, vec![(stream.0, sent)]);
        Ok(event)
    }
    fn record_device_event(&self, streams: &[Stream]) -> Result<Event> {
        let event = self.inner.record_device_event(streams)?;
        let seen = &mut *self.seen.lock().unwrap();
        let all = seen.sent.iter().enumerate().map(|(stream, &sent)| (stream as u64, sent)).collect();
        seen.events.insert(event.0, all);
        Ok(event)
    }
    fn query_event(&self, event: Event) -> Result<bool> {
        self.inner.query_event(event)
    }
    fn wait_event(&self, event: Event) -> Result<()> {
        self.inner.wait_event(event)
    }
    fn release_event(&self, event: Event) -> Result<()> {
        self.inner.release_event(event)
    }
    fn stream_wait_event(&self, stream: Stream, event: Event) -> Result<()> {
        self.inner.stream_wait_event(stream, event)?;
        let seen = &mut *self.seen.lock().unwrap();
        let points = seen.events[&event.0].clone();
        for (of, sent) in points {
            let covered = seen.busy.iter_mut().filter(|busy| busy.stream == of && busy.upto <= sent);
            covered.for_each(|busy| busy.waiting.push(stream.0));
        }
        Ok(())
    }
    fn synchronize_stream(&self, stream: Stream) -> Result<()> {
        self.inner.synchronize_stream(stream)
    }
    fn synchronize_device(&self) -> Result<()> {
        self.inner.synchronize_device()
    }
    fn is_capturing(&self, stream: Stream) -> Result<bool> {
        self.inner.is_capturing(stream)
    }
}

/// SplitMix64.
struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % n
    }
}

struct Live {
    at: Address,
    size: u64,
    stream: u64,
    bytes: Vec<(Handle, u64, u64)>,
}

/// A job whose steps repeat themselves nearly: layers whose activations stay until the backward pass, with
/// workspaces in between; some sizes vary, now and then a block stays for good.
struct Job {
    driver: Watched,
    heap: Heap<Watched>,
    random: Random,
    live: Vec<Live>,
    kept: Vec<Live>,
    refused: u64,
}

impl Job {
    fn new(memory: u64, seed: u64) -> Self {
        let driver = Watched::new(memory);
        let heap = Heap::new(driver.clone(), Config::lean()).expect("a heap");
        Job { driver, heap, random: Random(seed), live: Vec::new(), kept: Vec::new(), refused: 0 }
    }

    fn malloc(&mut self, site: u32, size: u64, stream: u64) -> Option<Live> {
        let at = match self.heap.malloc_from(site, size, Stream(stream), Tag(size, 0)) {
            Ok(at) => at,
            Err(HeapError::OutOfMemory { .. } | HeapError::Driver(_)) => {
                self.refused += 1;
                return None;
            }
            Err(other) => panic!("{other}"),
        };
        self.driver.forget_done();
        let seen = self.driver.seen.lock().unwrap();
        let bytes = Watched::bytes(&seen, at, size);
        for other in self.live.iter().chain(&self.kept) {
            assert!(!overlap(&bytes, &other.bytes), "{at:#x} shares memory with {:#x}", other.at);
        }
        for busy in seen.busy.iter().filter(|busy| busy.stream != stream && !busy.waiting.contains(&stream)) {
            assert!(!overlap(&bytes, &busy.bytes), "{at:#x} is in use by stream {}: {busy:?}", busy.stream);
        }
        drop(seen);
        // The stream works on it.
        self.driver.submit(stream);
        Some(Live { at, size, stream, bytes })
    }

    fn free(&mut self, live: Live) {
        self.heap.free(live.at).expect("a live block");
        let seen = &mut *self.driver.seen.lock().unwrap();
        let upto = seen.sent[live.stream as usize];
        let Live { at, size, stream, bytes } = live;
        seen.busy.push(Busy { bytes, at, size, stream, upto, waiting: Vec::new() });
    }

    fn step(&mut self, step: u64) {
        let stream = u64::from(step % 5 == 4);
        let varied = 64 + self.random.below(64);
        for layer in 0..12u32 {
            let size = match layer % 4 {
                0 => 9 * MIB + 77 * 512,
                1 => 3 * MIB + u64::from(layer) * 4096,
                2 => varied * 300_000,
                _ => 20 * MIB,
            };
            let workspace = self.malloc(1 + layer, 24 * MIB + u64::from(layer) * MIB, stream);
            let kept = self.malloc(100 + layer, size, stream);
            self.live.extend(kept);
            workspace.into_iter().for_each(|live| self.free(live));
        }
        if step.is_multiple_of(3) {
            let stays = self.malloc(300, 5 * MIB + 3 * 512, stream);
            self.kept.extend(stays);
        }
        while let Some(live) = self.live.pop() {
            let gradient = self.malloc(200, live.size, stream);
            self.free(live);
            gradient.into_iter().for_each(|live| self.free(live));
            // The device lags behind, sometimes far.
            if self.random.below(3) == 0 {
                let count = self.random.below(6);
                self.driver.inner.complete(Stream(stream), count);
            }
        }
        if step % 40 == 39 {
            while self.kept.len() > 2 {
                let index = self.random.below(self.kept.len() as u64) as usize;
                let live = self.kept.swap_remove(index);
                self.free(live);
            }
        }
        if step % 50 == 49 {
            self.heap.trim();
        }
        if let Err(error) = self.heap.check() {
            panic!("step {step}: {error}");
        }
    }

    fn end(mut self) -> (u64, u64, u64) {
        self.driver.inner.clear_faults();
        for live in std::mem::take(&mut self.live).into_iter().chain(std::mem::take(&mut self.kept)) {
            self.free(live);
        }
        self.heap.trim();
        self.heap.check().expect("a sound heap");
        assert_eq!((self.heap.reserved(), self.driver.inner.violations()), (0, 0));
        assert_eq!(self.heap.stats().segment.all.current, 0);
        let work = self.heap.stats().work;
        let aliases = self.driver.seen.lock().unwrap().aliases;
        drop(self.heap);
        assert_eq!(self.driver.inner.created(), 0);
        (aliases, work.called_back, work.retraced)
    }
}

#[test]
fn no_byte_is_anybody_elses_at_another_address() {
    for seed in 1..4 {
        let mut job = Job::new(4 << 30, seed);
        for step in 0..200 {
            job.step(step);
        }
        assert_eq!(job.refused, 0);
        let (aliases, called_back, retraced) = job.end();
        assert!(aliases > 100 && called_back > 100 && retraced > 100, "{aliases} {called_back} {retraced}");
    }
}

#[test]
fn a_device_that_is_full_keeps_the_same_promises() {
    for seed in 1..4 {
        let mut job = Job::new(260 * MIB, seed);
        for step in 0..150 {
            job.step(step);
        }
        let (aliases, ..) = job.end();
        assert!(aliases > 0);
    }
}

#[test]
fn faults_break_no_promise() {
    for (seed, error) in [(1, DriverError::OutOfMemory), (2, DriverError::Failed { call: "any", code: 999 })]
    {
        let mut job = Job::new(4 << 30, seed);
        for step in 0..200 {
            let call = [None, Some(Call::Map), Some(Call::Unmap), Some(Call::Create)][step as usize % 4];
            let nth = 1 + job.random.below(20);
            job.driver.inner.fail(call, nth, error.clone());
            job.step(step);
        }
        job.end();
    }
}

#[test]
fn a_steady_loop_soon_needs_no_call() {
    // Every block is smaller than what is free, but nothing that is free is in one piece.
    let driver = BooksDriver::with_memory(8 << 30);
    let mut heap = Heap::new(driver, Config::lean()).expect("a heap");
    let step = |heap: &mut Heap<BooksDriver>, odd: u64| {
        let mut live: Vec<Address> = Vec::new();
        let malloc = |heap: &mut Heap<BooksDriver>, size: u64| {
            heap.malloc(size, Stream(0), Tag::default()).expect("memory")
        };
        for layer in 0..30 {
            let workspace = malloc(heap, (40 + layer) * MIB);
            live.push(malloc(heap, (10 + 2 * (odd + layer % 4)) * MIB - 4096));
            heap.free(workspace).expect("a live block");
        }
        // The second half goes in the order in which it came: the holes are strewn.
        for at in live.drain(..) {
            let gradient = malloc(heap, 33 * MIB);
            heap.free(at).expect("a live block");
            heap.free(gradient).expect("a live block");
        }
        heap.check().expect("a sound heap");
        heap.stats().work.memory_calls()
    };
    // Two kinds of steps in turn, as training and validation.
    let calls: Vec<u64> = (0..60).map(|i| step(&mut heap, i / 3 % 2)).collect();
    // A switch from one kind to the other may still need a few; the steps in between none.
    let late = calls[59] - calls[40];
    assert!(late <= 40, "{late} calls in 19 steps, a hundred blocks each: {calls:?}");
    assert!(calls[41..].windows(2).filter(|pair| pair[0] == pair[1]).count() >= 12, "{calls:?}");
    let stats = heap.stats();
    let ratio = stats.reserved_bytes.all.peak as f64 / stats.requested_bytes.all.peak as f64;
    // A job of half a gigabyte: the last page of every block counts.
    assert!(ratio <= 1.05, "{ratio}");
}

#[test]
fn a_reset_of_the_peaks_does_not_change_what_may_be_made() {
    let run = |reset: bool| {
        let mut heap = Heap::new(BooksDriver::with_memory(8 << 30), Config::lean()).expect("a heap");
        for step in 0..30u64 {
            let mut live = Vec::new();
            for layer in 0..20 {
                let size = (10 + (step * 7 + layer * 3) % 23) * MIB;
                live.push(heap.malloc(size, Stream(0), Tag::default()).expect("memory"));
            }
            for at in live {
                heap.free(at).expect("a live block");
            }
            if reset {
                heap.reset_peak();
            }
        }
        heap.stats().work
    };
    assert_eq!(run(true), run(false));
}

#[test]
fn what_is_written_at_one_address_is_not_written_over_at_another() {
    let options = Options { memory: 1 << 30, ..Options::default() };
    let mut heap = Heap::new(AliasingDriver::new(options), Config::lean()).expect("a heap");
    let mut random = Random(5);
    let mut live: Vec<(Address, u64, u64)> = Vec::new();
    // The first and last word of every page that a block touches, and of the block itself.
    let words = |at: Address, size: u64| {
        let pages = (at / 4096 + 1..(at + size) / 4096).step_by(64).map(|page| page * 4096);
        std::iter::once(at).chain(pages).chain(std::iter::once((at + size) / 8 * 8 - 8)).collect::<Vec<_>>()
    };
    for op in 0..4000u64 {
        if live.len() > 24 || (op % 7 == 0 && !live.is_empty()) {
            let (at, size, mark) = live.swap_remove(random.below(live.len() as u64) as usize);
            for word in words(at, size) {
                // SAFETY: the block is live, `word` lies in it and is aligned to 8.
                let found = unsafe { std::ptr::read_volatile(word as *const u64) };
                assert_eq!(found, mark, "at {word:#x} of the block at {at:#x}");
            }
            heap.free(at).expect("a live block");
        }
        let size = (1 + random.below(40)) * MIB + random.below(4096) * 512;
        if let Ok(at) = heap.malloc(size, Stream(0), Tag::default()) {
            for word in words(at, size) {
                // SAFETY: as above; the block was handed out just now.
                unsafe { std::ptr::write_volatile(word as *mut u64, op) };
            }
            live.push((at, size, op));
        }
    }
    heap.check().expect("a sound heap");
    let work = heap.stats().work;
    assert!(work.stitched > 100 && work.called_back > 10, "{work:?}");
}

/// The larger requests of one training step of a recorded job, in MiB: `+` is handed out, `-` given back, `z` is
/// the batch of the step before, and what is called `_` stays for ever.
const LEAKY_STEP: &str = "+b:48 +c:48 +d:96 +e:758 +f:480 -e -c +g:96 +_:6 -z -g +i:96 +j:48 +k:96 +l:48 +m:758 -m \
                          -k +n:48 -j +o:16 +p:758 -p -l -n -i -b -d -f +q:48 +z:98 +s:53 -s -q -o";

/// Memory calls in the last 40 of 200 such steps, when the device is `lag` requests behind the host.
fn late_calls(config: Config, lag: usize) -> u64 {
    let driver = BooksDriver::with_memory(100 << 30);
    let mut heap = Heap::new(driver.clone(), config).expect("a heap");
    let mut live = std::collections::HashMap::new();
    let mut calls = Vec::new();
    let mut behind = 0;
    for step in 0..200 {
        for (place, token) in LEAKY_STEP.split(' ').enumerate() {
            let (name, size) = token[1..].split_once(':').unwrap_or((&token[1..], ""));
            if token.starts_with('-') {
                if let Some(at) = live.remove(name) {
                    heap.free(at).expect("a live block");
                }
                continue;
            }
            driver.submit(Stream(0));
            behind += 1;
            if behind > lag {
                driver.complete(Stream(0), 1);
                behind -= 1;
            }
            let size = size.parse::<u64>().expect("a size") * MIB + place as u64 * 512;
            let at = heap.malloc(size, Stream(0), Tag::default()).expect("memory");
            if name != "_" {
                live.insert(name, at);
            }
        }
        calls.push(heap.stats().work.memory_calls());
        if step % 40 == 39 {
            heap.check().expect("a sound heap");
        }
    }
    calls[199] - calls[159]
}

#[test]
fn what_is_mapped_again_in_every_step_buys_room() {
    // With no slack to begin with, where best fit alone is not enough.
    let config = || Config { slack: 0, slack_moving: 0, slack_kept: 0, ..Config::speed() };
    let late = [0, 4, 12, 60].map(|lag| late_calls(config(), lag));
    assert!(late.iter().all(|&calls| calls < 100), "memory calls of 40 steps: {late:?}");
    let poor = Config { slack_hurried: 5, slack_unsettled: 0, ..config() };
    assert!(late_calls(poor, 60) >= 3 * 40, "the pattern needs room");
}

#[test]
fn what_stays_is_made_for_several_steps_at_once() {
    // A block stays in every step: new memory for it is asked for in one of two or three, and none is taken from where
    // other requests will want it, to be mapped there again.
    let late = [0, 4, 12, 60].map(|lag| late_calls(Config::speed(), lag));
    assert!(late.iter().all(|&calls| calls <= 40), "memory calls of 40 steps: {late:?}");
}

#[test]
fn small_blocks_that_stay_come_in_large_pieces() {
    let mut heap = Heap::new(BooksDriver::with_memory(100 << 30), Config::speed()).expect("a heap");
    let mut calls = [0; 3];
    for (blocks, calls) in [0, 4096, 512].into_iter().zip(&mut calls) {
        for _ in 0..blocks {
            heap.malloc(512 << 10, Stream(0), Tag::default()).expect("memory");
        }
        *calls = heap.stats().work.memory_calls();
    }
    heap.check().expect("a sound heap");
    assert!(calls[2] - calls[1] <= 2 * 256 / 8, "memory calls for the last 256 MiB: {calls:?}");
    assert!(heap.reserved() <= 2304 * MIB + 20 * MIB, "{} bytes are reserved", heap.reserved());
}
