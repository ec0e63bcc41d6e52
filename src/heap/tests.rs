//! The heap's behaviour on a device that keeps books only, `check()`ed after every step.

use super::size_class::LOOSE;
use super::*;
use crate::driver::host::{BooksDriver, Call, Options};

const MIB: u64 = 1 << 20;
const S0: Stream = Stream(0);
const TAG: Tag = Tag(7, 9);

fn heap(memory: u64) -> (BooksDriver, Heap<BooksDriver>) {
    let driver = BooksDriver::with_memory(memory);
    let heap = Heap::new(driver.clone(), Config::lean()).unwrap();
    (driver, heap)
}

fn free_all(heap: &mut Heap<BooksDriver>, blocks: impl IntoIterator<Item = Address>) {
    for at in blocks {
        heap.free(at).unwrap();
    }
}

fn sound<D: Driver>(heap: &Heap<D>) {
    if let Err(error) = heap.check() {
        panic!("{error}");
    }
}

#[test]
fn a_block_comes_back_with_its_tag() {
    let (_, mut heap) = heap(1 << 30);
    for size in [0, 1, 511, 512, 513, 8192, 8193, 100_000, MIB, MIB + 1, 30 * MIB] {
        let at = heap.malloc(size, S0, TAG).unwrap();
        sound(&heap);
        assert_eq!(at % 512, 0);
        assert!(AddressSpace::owns(at));
        let block = heap.block_at(at).unwrap().size;
        assert!(block - size <= (size / 8).max(512), "{size} in {block}");
        let info = heap.block_at(at + block - 1).unwrap();
        assert_eq!((info.address, info.size, info.requested, info.tag), (at, block, size, TAG));
        let freed = heap.free(at).unwrap();
        assert_eq!(freed, Freed { requested: size, size: block, stream: S0, tag: TAG });
        assert_eq!(heap.free(at), Err(HeapError::NotOurs { address: at }));
        assert_eq!(heap.block_at(at), None);
        sound(&heap);
    }
}

#[test]
fn a_slab_of_large_slots_is_made_for_several_blocks() {
    let (_, mut heap) = heap(1 << 30);
    let (size, fitted, slot) = (39_000, 39_424, 40_960);
    // One that comes and goes, however often.
    for _ in 0..100 {
        let at = heap.malloc(size, S0, TAG).unwrap();
        assert_eq!(heap.block_at(at).unwrap().size, fitted);
        heap.free(at).unwrap();
    }
    let mut blocks = Vec::new();
    for i in 0..30 {
        let at = heap.malloc(size, S0, TAG).unwrap();
        let expected = if i < LOOSE { fitted } else { slot };
        assert_eq!(heap.block_at(at).unwrap().size, expected, "block {i}");
        blocks.push(at);
        sound(&heap);
    }
    // Those that lie outside are known also while another stream works on them.
    heap.record_stream(blocks[0], Stream(4)).unwrap();
    for at in blocks {
        heap.free(at).unwrap();
        sound(&heap);
    }
    heap.trim();
    sound(&heap);
    assert_eq!(heap.reserved(), 0);
}

#[test]
fn foreign_and_inner_addresses_are_refused() {
    let (_, mut heap) = heap(1 << 30);
    let small = heap.malloc(1024, S0, TAG).unwrap();
    let large = heap.malloc(5 * MIB, S0, TAG).unwrap();
    for at in [0, 1, small + 512, small + 1024, large + 512, large + MIB, u64::MAX] {
        assert!(heap.free(at).is_err());
        assert!(heap.record_stream(at, Stream(4)).is_err());
        assert!(heap.tag_mut(at).is_err());
    }
    sound(&heap);
    *heap.tag_mut(small).unwrap() = Tag(1, 2);
    assert_eq!(heap.free(small).unwrap().tag, Tag(1, 2));
}

#[test]
fn freed_memory_is_used_again_without_driver_calls() {
    let (driver, mut heap) = heap(8 << 30);
    let sizes = [600, 9000, 700_000, 3 * MIB, 40 * MIB, 5000, 2 * MIB + 512];
    let step = |heap: &mut Heap<BooksDriver>| {
        let blocks: Vec<Address> = sizes.iter().map(|&size| heap.malloc(size, S0, TAG).unwrap()).collect();
        free_all(heap, blocks.into_iter().rev());
    };
    step(&mut heap);
    step(&mut heap);
    let before = driver.calls();
    (0..50).for_each(|_| step(&mut heap));
    assert_eq!(driver.calls(), before);
    sound(&heap);
}

#[test]
fn holes_are_moved_instead_of_growing() {
    let (driver, mut heap) = heap(8 << 30);
    let blocks: Vec<Address> = (0..64).map(|_| heap.malloc(20 * MIB, S0, TAG).unwrap()).collect();
    let before = heap.reserved();
    free_all(&mut heap, blocks.iter().copied().step_by(2));
    sound(&heap);
    let big = heap.malloc(600 * MIB, S0, TAG).unwrap();
    sound(&heap);
    assert!(heap.reserved() <= before + before / 33, "{} of {before}", heap.reserved());
    assert!(heap.stats().work.stitched > 0);
    heap.free(big).unwrap();
    free_all(&mut heap, blocks.iter().copied().skip(1).step_by(2));
    assert_eq!(heap.allocated(), 0);
    let reserved = heap.reserved();
    assert_eq!(heap.trim(), reserved);
    sound(&heap);
    assert_eq!((driver.created(), driver.mapped(), driver.violations()), (0, 0, 0));
}

#[test]
fn a_recorded_stream_defers_the_free() {
    let (driver, mut heap) = heap(1 << 30);
    let other = Stream(5);
    for size in [2000, 50_000, 3 * MIB] {
        let at = heap.malloc(size, S0, TAG).unwrap();
        heap.record_stream(at, other).unwrap();
        heap.record_stream(at, S0).unwrap();
        driver.submit(other);
        assert_eq!(heap.free(at).unwrap().requested, size);
        sound(&heap);
        assert_eq!(heap.block_at(at).unwrap().state, BlockState::PendingFree);
        assert!(heap.free(at).is_err(), "a pending block is freed already");
        let stats = heap.stats();
        assert_eq!((stats.allocation.all.current, stats.active.all.current), (0, 1));
        let next = heap.malloc(size, S0, TAG).unwrap();
        assert_ne!(next, at, "in use by the other stream");
        driver.complete(other, 1);
        heap.free(next).unwrap();
        heap.process_events();
        sound(&heap);
        assert_eq!(heap.stats().active.all.current, 0);
    }
    assert_eq!((driver.events(), driver.violations()), (0, 0));
}

#[test]
fn pages_move_between_streams_only_when_quiet() {
    let (driver, mut heap) = heap(220 * MIB);
    let (a, b) = (Stream(1), Stream(2));
    let block = heap.malloc(200 * MIB, a, TAG).unwrap();
    driver.submit(a);
    heap.free(block).unwrap();
    // a's work may still use the pages: moving them is no work of a stream, so the host waits.
    let moved = heap.malloc(180 * MIB, b, TAG).unwrap();
    sound(&heap);
    let work = heap.stats().work;
    assert_eq!((work.lent, work.host_waits, driver.outstanding(a)), (0, 1, 0));
    assert!(work.stitched_bytes >= 160 * MIB);
    assert_eq!(heap.free(moved).unwrap().stream, b);
    sound(&heap);
    assert_eq!(driver.violations(), 0);
}

#[test]
fn pages_stay_where_they_are_while_any_stream_works() {
    let (driver, mut heap) = heap(220 * MIB);
    let (a, b, unsaid) = (Stream(1), Stream(2), Stream(9));
    let block = heap.malloc(200 * MIB, a, TAG).unwrap();
    // A program that uses a block on another stream and does not say so.
    driver.submit(unsaid);
    heap.free(block).unwrap();
    let moved = heap.malloc(180 * MIB, b, TAG).unwrap();
    assert_eq!(driver.outstanding(unsaid), 0, "the pages were taken away from under a kernel");
    heap.free(moved).unwrap();
    driver.submit(unsaid);
    heap.trim();
    assert_eq!(driver.outstanding(unsaid), 0, "and given back to the device");
    assert_eq!(driver.violations(), 0);
}

#[test]
fn lent_memory_returns_after_the_borrower() {
    let driver = BooksDriver::with_memory(100 * MIB);
    let config = Config { slack_before_wait: u32::MAX, ..Config::lean() };
    let mut heap = Heap::new(driver.clone(), config).unwrap();
    let (a, b) = (Stream(1), Stream(2));
    let block = heap.malloc(90 * MIB, a, TAG).unwrap();
    driver.submit(a);
    heap.free(block).unwrap();
    let lent = heap.malloc(80 * MIB, b, TAG).unwrap();
    assert_eq!((lent, heap.stats().work.lent, heap.stats().work.host_waits), (block, 1, 0));
    driver.submit(b);
    assert_eq!(driver.complete(b, 1), 0, "b waits for a");
    assert_eq!(heap.free(lent).unwrap().stream, b);
    assert_eq!(heap.stats().active.all.current, 1, "a may not have it before b is done");
    sound(&heap);
    driver.complete(a, 1);
    driver.complete(b, 1);
    assert_eq!(heap.malloc(90 * MIB, a, TAG), Ok(block));
    sound(&heap);
}

#[test]
fn out_of_memory_is_a_value_and_heals() {
    let (driver, mut heap) = heap(64 * MIB);
    let first = heap.malloc(40 * MIB, S0, TAG).unwrap();
    match heap.malloc(30 * MIB, S0, TAG) {
        Err(HeapError::OutOfMemory { requested, allocated, total, .. }) => {
            assert_eq!((requested, allocated, total), (30 * MIB, 40 * MIB, 64 * MIB));
        }
        other => panic!("{other:?}"),
    }
    sound(&heap);
    assert_eq!((heap.stats().num_ooms, heap.stats().num_alloc_retries), (1, 1));
    for size in [u64::MAX, u64::MAX - 511, 1 << 50, 65 * MIB] {
        assert!(matches!(heap.malloc(size, S0, TAG), Err(HeapError::OutOfMemory { .. })));
    }
    heap.free(first).unwrap();
    let whole = heap.malloc(60 * MIB, S0, TAG).unwrap();
    heap.free(whole).unwrap();
    heap.set_limit(Some(8 * MIB));
    heap.trim();
    assert!(heap.malloc(9 * MIB, S0, TAG).is_err());
    assert!(heap.malloc(8 * MIB, S0, TAG).is_ok());
    assert_eq!(driver.violations(), 0);
}

/// A kernel that is loaded when it is first used needs memory too, and nobody catches its error.
#[test]
fn a_full_device_has_room_for_kernels() {
    for (memory, left) in [(2048 * MIB, 16 * MIB), (64 * 1024 * MIB, 256 * MIB)] {
        let (driver, mut heap) = heap(memory);
        while heap.malloc(12 * MIB, S0, TAG).is_ok() {}
        let free = memory - driver.created();
        assert!((left..left + 12 * MIB).contains(&free), "{free} of {memory} bytes are left");
        match heap.malloc(12 * MIB, S0, TAG) {
            Err(HeapError::OutOfMemory { free: told, left: told_left, .. }) => {
                assert_eq!((told, told_left), (free, left));
            }
            other => panic!("{other:?}"),
        }
        sound(&heap);
    }
}

#[test]
fn the_last_bytes_are_found() {
    let (_, mut heap) = heap(8 * MIB);
    let mut blocks = Vec::new();
    while let Ok(at) = heap.malloc(4096, S0, TAG) {
        blocks.push(at);
    }
    sound(&heap);
    assert!(blocks.len() as u64 * 4096 > 7 * MIB, "{} blocks", blocks.len());
    free_all(&mut heap, blocks);
    assert!(heap.malloc(8 * MIB, S0, TAG).is_ok(), "the slabs are gone again");
    sound(&heap);
}

#[test]
fn a_pool_is_private_until_released() {
    let (driver, mut heap) = heap(1 << 30);
    let (id, stream) = (PoolId(1, 0), Stream(9));
    heap.begin_pool(id, Box::new(move |s| s == stream)).unwrap();
    assert!(heap.begin_pool(id, Box::new(|_| true)).is_err());
    driver.begin_capture(stream);
    let inside = heap.malloc(20 * MIB, stream, TAG).unwrap();
    let outside = heap.malloc(20 * MIB, S0, TAG).unwrap();
    heap.record_stream(inside, Stream(3)).unwrap();
    heap.free(inside).unwrap();
    let again = heap.malloc(30 * MIB, stream, TAG).unwrap();
    assert_eq!(heap.trim(), 0, "nothing is asked during a capture");
    assert_eq!(heap.block_at(again).unwrap().pool, id);
    assert_eq!(heap.block_at(outside).unwrap().pool, PoolId(0, 0));
    driver.end_capture(stream);
    heap.end_pool(id).unwrap();
    sound(&heap);
    heap.free(again).unwrap();
    heap.free(outside).unwrap();
    let eager = heap.malloc(20 * MIB, stream, TAG).unwrap();
    assert_eq!(heap.block_at(eager).unwrap().pool, PoolId(0, 0), "the pool is kept apart");
    heap.free(eager).unwrap();
    heap.trim();
    assert!(heap.reserved() >= 50 * MIB);
    sound(&heap);
    heap.release_pool(id).unwrap();
    assert!(heap.release_pool(id).is_err());
    heap.trim();
    assert_eq!(heap.reserved(), 0);
    assert_eq!(heap.pool_holds(id), None);
    sound(&heap);
    assert_eq!((driver.violations(), driver.created()), (0, 0));
}

#[test]
fn a_mem_pool_in_eager_mode_still_waits_for_events() {
    let (driver, mut heap) = heap(1 << 30);
    heap.begin_pool(PoolId(0, 1), Box::new(|_| true)).unwrap();
    let at = heap.malloc(2 * MIB, S0, TAG).unwrap();
    heap.record_stream(at, Stream(1)).unwrap();
    heap.free(at).unwrap();
    heap.process_events();
    assert_eq!(heap.stats().active.all.current, 0);
    heap.end_pool(PoolId(0, 1)).unwrap();
    heap.release_pool(PoolId(0, 1)).unwrap();
    assert_eq!(driver.violations(), 0);
    sound(&heap);
}

#[test]
fn without_virtual_memory_segments_are_plain() {
    let options = Options { memory: 1 << 30, virtual_memory: false, ..Options::default() };
    let driver = BooksDriver::new(options);
    let mut heap = Heap::new(driver.clone(), Config::lean()).unwrap();
    let blocks: Vec<Address> =
        [600, 70_000, 3 * MIB, 30 * MIB].iter().map(|&size| heap.malloc(size, S0, TAG).unwrap()).collect();
    sound(&heap);
    assert_eq!(heap.reserved(), 2 * MIB + 2 * MIB + 20 * MIB + 30 * MIB);
    assert!(heap.stats().inactive_split_bytes.all.current > 0);
    free_all(&mut heap, blocks);
    sound(&heap);
    heap.trim();
    sound(&heap);
    let stats = heap.stats();
    assert_eq!((stats.reserved_bytes.all.current, stats.segment.all.current), (0, 0));
    assert_eq!((stats.inactive_split.all.current, driver.created()), (0, 0));
    assert!(heap.malloc(600, S0, TAG).is_ok());
    sound(&heap);
}

#[test]
fn segments_are_contiguous_and_add_up() {
    let (_, mut heap) = heap(1 << 30);
    let mut blocks: Vec<Address> = (1..400).map(|i| heap.malloc(i * i * 13, S0, TAG).unwrap()).collect();
    while blocks.len() > 200 {
        heap.free(blocks.swap_remove(blocks.len() * 7 / 11)).unwrap();
    }
    let segments = heap.segments();
    assert!(segments.is_sorted_by_key(|segment| segment.address));
    for segment in &segments {
        let mut at = segment.address;
        for block in &segment.blocks {
            assert_eq!(block.address, at);
            at += block.size;
        }
        assert_eq!(at, segment.address + segment.size);
    }
    let stats = heap.stats();
    assert_eq!(segments.iter().map(|s| s.size).sum::<u64>(), stats.reserved_bytes.all.current);
    assert_eq!(segments.iter().map(SegmentInfo::allocated).sum::<u64>(), stats.allocated_bytes.all.current);
    assert_eq!(segments.iter().map(SegmentInfo::requested).sum::<u64>(), stats.requested_bytes.all.current);
    let mut live = 0;
    heap.for_each_live(|_| live += 1);
    assert_eq!(live, 200);
}

#[test]
fn the_end_gives_everything_back() {
    let (driver, mut heap) = heap(1 << 30);
    let at = heap.malloc(9 * MIB, S0, TAG).unwrap();
    heap.malloc(900, Stream(3), TAG).unwrap();
    heap.record_stream(at, Stream(3)).unwrap();
    driver.submit(Stream(3));
    heap.free(at).unwrap();
    drop(heap);
    assert!(!AddressSpace::owns(at));
    assert_eq!((driver.created(), driver.reservations(), driver.events()), (0, 0, 0));
    assert_eq!(driver.violations(), 0);
    assert!(driver.calls().of(Call::Unreserve) >= 2);
}
