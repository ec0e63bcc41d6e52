//! Checkpoints: what a private pool has handed out at a moment, and putting it back to that later.
//!
//! CUDA graph trees record graphs of several paths into one pool. Before a path is recorded, exactly those
//! blocks of the pool must be handed out that were so at the path's end, at the addresses that the graphs
//! before it know, whatever the pool has handed out and taken back since.
//!
//! A restored pool's blocks are freed first, all of them, and its empty slabs given back. Then its memory is
//! free as far as it is mapped (a held pool keeps its pages), and each block of the checkpoint is cut out of
//! it where it lay. What could stand in the way is looked at before anything is changed.
//!
//! It knows addresses, not who uses them. Invariants: a restored pool has handed out the checkpoint's blocks
//! and no other; a pool that cannot be restored is as it was.

use super::arena::{RUNS, kind_of, lane_of};
use super::block::{NONE, State};
use super::config::PoolId;
use super::fit::GRAIN;
use super::segment::{Found, PAGE};
use super::slab::{RUN_UNIT, Slot, SlotState, run_for};
use super::stats::SMALL;
use super::{Address, BlockInfo, Driver, Handed, Heap, HeapError, SLAB_MAX, SMALL_MAX, Stream};

/// What a pool had handed out at a moment.
#[derive(Clone, Debug)]
pub struct Checkpoint {
    pool: PoolId,
    /// By address.
    blocks: Vec<Kept>,
}

/// One block of a checkpoint.
#[derive(Clone, Debug)]
struct Kept {
    block: BlockInfo,
    /// Where the slab began that the block was a slot of.
    slab: Option<Address>,
    /// Other streams that used it.
    uses: Vec<Stream>,
}

impl Kept {
    /// Where memory must be cut out for the block: from, bytes.
    fn range(&self) -> (Address, u64) {
        self.slab.map_or((self.block.address, self.block.size), |base| (base, run_for(self.block.size)))
    }
}

impl Checkpoint {
    /// The pool.
    pub fn pool(&self) -> PoolId {
        self.pool
    }

    /// The blocks, by address.
    pub fn blocks(&self) -> impl ExactSizeIterator<Item = &BlockInfo> {
        self.blocks.iter().map(|kept| &kept.block)
    }
}

/// What [`Heap::restore`] did, by address. A block that was handed out before and is again is in both.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Restored {
    /// The blocks that were taken back.
    pub freed: Vec<BlockInfo>,
    /// The blocks that are handed out now: those of the checkpoint.
    pub allocated: Vec<BlockInfo>,
}

impl Restored {
    /// The blocks that were handed out before and are not the same now.
    pub fn gone(&self) -> impl Iterator<Item = &BlockInfo> {
        self.freed.iter().filter(|block| !has(&self.allocated, block))
    }

    /// The blocks that are handed out now and were not the same before.
    pub fn back(&self) -> impl Iterator<Item = &BlockInfo> {
        self.allocated.iter().filter(|block| !has(&self.freed, block))
    }
}

/// Whether the blocks, which are in the order of their addresses, have this one among them.
fn has(blocks: &[BlockInfo], block: &BlockInfo) -> bool {
    let place = blocks.binary_search_by_key(&block.address, |other| other.address);
    place.is_ok_and(|place| blocks[place] == *block)
}

impl<D: Driver> Heap<D> {
    /// Notes down what a pool has handed out. Blocks that wait for other streams are free to it.
    ///
    /// # Errors
    /// [`HeapError::Pool`] if nobody holds the pool.
    pub fn checkpoint(&self, id: PoolId) -> Result<Checkpoint, HeapError> {
        let pool = self.held_pool(id)?;
        let mut blocks: Vec<Kept> =
            self.handed_out_by(pool, true).into_iter().map(|handed| self.kept(handed)).collect();
        blocks.sort_unstable_by_key(|kept| kept.block.address);
        Ok(Checkpoint { pool: id, blocks })
    }

    /// Takes back whatever the checkpoint's pool has handed out, and hands out the checkpoint's blocks
    /// again, where they lay and with their tags. Waits for other streams that use blocks of the pool.
    ///
    /// # Errors
    /// [`HeapError::Pool`] if nobody holds the pool, if a capture keeps from waiting for other streams, or
    /// if the pool's memory is not where it was (nobody held it for a while). Nothing has changed then.
    pub fn restore(&mut self, checkpoint: &Checkpoint) -> Result<Restored, HeapError> {
        let id = checkpoint.pool;
        let pool = self.held_pool(id)?;
        self.wait_for_users(pool, id)?;
        let segments: Option<Vec<u16>> =
            checkpoint.blocks.iter().map(|kept| self.segment_for(pool, kept)).collect();
        let segments = segments
            .ok_or(HeapError::Pool { id, why: "has lost memory since: nobody held it for a while" })?;
        let freed = self.take_all_back(pool)?;
        for (kept, segment) in checkpoint.blocks.iter().zip(segments) {
            let lost = HeapError::Pool { id, why: "has no memory where a block lay" };
            self.hand_out_again(kept, segment).ok_or(lost)?;
        }
        Ok(Restored { freed, allocated: checkpoint.blocks().copied().collect() })
    }

    fn held_pool(&self, id: PoolId) -> Result<u32, HeapError> {
        match self.pools.find(id) {
            Some(0) => Err(HeapError::Pool { id, why: "is everybody's" }),
            Some(pool) if !self.pools.open(pool) => Ok(pool),
            Some(_) => Err(HeapError::Pool { id, why: "is held by nobody any more" }),
            None => Err(HeapError::Pool {
                id,
                why: "is not known: nothing was recorded to it, or nothing is left of it",
            }),
        }
    }

    fn lanes_of(&self, pool: u32) -> impl Iterator<Item = usize> {
        (0..self.lanes.len()).filter(move |&lane| self.lanes[lane].in_use && self.lanes[lane].pool == pool)
    }

    /// What the pool has handed out (`live`), or what waits for other streams.
    fn handed_out_by(&self, pool: u32, live: bool) -> Vec<Handed> {
        let (block_state, slot_state) =
            if live { (State::Live, SlotState::Live) } else { (State::Pending, SlotState::Pending) };
        let mut found = Vec::new();
        let arenas = self.lanes_of(pool).flat_map(|lane| &self.lanes[lane].arenas);
        for &segment in arenas.flat_map(|arena| &arena.segments) {
            let mut id = self.space.segments[segment as usize].first;
            while id != NONE {
                let block = &self.blocks[id];
                if block.state == State::Slab {
                    let slots = self.slabs[block.b].meta.iter().enumerate();
                    let slots = slots.filter(|(_, slot)| slot.state() == slot_state);
                    found.extend(slots.map(|(slot, _)| Handed::Slot(block.b, slot as u16)));
                } else if block.state == block_state {
                    found.push(Handed::Block(id));
                }
                id = block.next;
            }
        }
        found
    }

    fn kept(&self, handed: Handed) -> Kept {
        let (block, slab) = match handed {
            Handed::Block(id) => (self.block_info(id), None),
            Handed::Slot(slab, slot) => {
                (self.slot_info(slab, usize::from(slot)), Some(self.slabs[slab].base))
            }
        };
        let uses = self.pending.uses(self.uses_of(handed)).map_or(Vec::new(), |uses| uses.streams.clone());
        Kept { block, slab, uses }
    }

    /// Waits until no other stream uses a block of the pool, freed or not.
    fn wait_for_users(&mut self, pool: u32, id: PoolId) -> Result<(), HeapError> {
        self.process_events();
        let used = |heap: &Self| {
            let live = heap.handed_out_by(pool, true);
            !heap.handed_out_by(pool, false).is_empty()
                || live.into_iter().any(|handed| heap.uses_of(handed) != NONE)
        };
        if used(self) && !(self.wait_device() && self.handed_out_by(pool, false).is_empty()) {
            let why = if self.capturing() {
                "has blocks that other streams may still use, which cannot be waited for during a capture"
            } else {
                "has blocks that other streams may still use, and the device could not be waited for"
            };
            return Err(HeapError::Pool { id, why });
        }
        Ok(())
    }

    /// The segment that a block of the checkpoint lies in, if the pool has all the memory there.
    fn segment_for(&self, pool: u32, kept: &Kept) -> Option<u16> {
        let (at, size) = kept.range();
        let lane = *self.lane_of.get(&(pool, kept.block.stream))?;
        let arenas = &self.lanes[usize::from(lane)].arenas;
        let mut segments = arenas.iter().flat_map(|arena| &arena.segments).copied();
        let index = segments.find(|&index| self.space.segments[index as usize].contains(at))?;
        let segment = &self.space.segments[index as usize];
        let kind = kind_of(segment.arena);
        let (right, unit) = match kept.slab {
            Some(_) => (kind == RUNS, RUN_UNIT),
            None => (kind != RUNS && (kind == SMALL) == (size <= SMALL_MAX), GRAIN),
        };
        // Addresses of a pool that came back may be cut in another way.
        let aligned = (at - segment.base).is_multiple_of(unit);
        let mut pages = (at / PAGE * PAGE..at + size).step_by(PAGE as usize);
        let mapped = segment.plain || pages.all(|page| self.space.piece_at(index, page).is_some());
        (right && aligned && at + size <= segment.end() && mapped).then_some(index)
    }

    /// Frees every block of the pool, whose users were waited for, and gives its slabs back.
    fn take_all_back(&mut self, pool: u32) -> Result<Vec<BlockInfo>, HeapError> {
        let live = self.handed_out_by(pool, true);
        let mut freed: Vec<BlockInfo> = Vec::with_capacity(live.len());
        for handed in live {
            freed.push(self.kept(handed).block);
            let uses = self.uses_of(handed);
            self.pending.drop_uses(uses);
            match handed {
                Handed::Block(id) => self.blocks[id].b = NONE,
                Handed::Slot(slab, slot) => self.slabs[slab].meta[slot as usize].uses = NONE,
            }
        }
        for block in &freed {
            self.free(block.address)?;
        }
        let lanes: Vec<usize> = self.lanes_of(pool).collect();
        for lane in lanes {
            self.retire_empty_slabs(lane);
        }
        freed.sort_unstable_by_key(|block| block.address);
        Ok(freed)
    }

    /// Hands out one block of the checkpoint; none if its place is not free.
    fn hand_out_again(&mut self, kept: &Kept, segment: u16) -> Option<()> {
        let BlockInfo { address: at, size, requested, tag, .. } = kept.block;
        match kept.slab {
            None => {
                let id = self.cut_out(segment, at).filter(|&id| self.blocks[id].size >= size)?;
                self.hand_out(id, size, requested, tag);
                if size <= SLAB_MAX {
                    let lane = lane_of(self.blocks[id].arena);
                    self.lanes[lane].loose[self.classes.index(size)] += 1;
                }
            }
            Some(base) => {
                // All slabs were given back: what lies here was made for a slot before this one.
                let slab = match self.space.find(at) {
                    Found::Slab(slab) => slab,
                    _ => {
                        let id = self.cut_out(segment, base)?;
                        let lane = lane_of(self.space.segments[segment as usize].arena);
                        let class = self.classes.index(size);
                        (self.blocks[id].size >= run_for(size)).then(|| self.cut_up(lane, class, id))?
                    }
                };
                self.take_this_slot(slab, at, Slot::live(requested, tag))?;
                self.stats.handed_out(SMALL, size, requested);
            }
        }
        for &stream in &kept.uses {
            self.record_stream(at, stream).ok()?;
        }
        Some(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Config, Tag};
    use super::*;
    use crate::driver::host::{BooksDriver, Call, Options};
    use crate::driver::{DriverError, Stream};

    const MIB: u64 = 1 << 20;
    const POOL: PoolId = PoolId(0, 3);
    const S1: Stream = Stream(1);
    const S2: Stream = Stream(2);
    /// Slots of several classes, blocks that a slab could serve but that lie alone, and larger ones.
    const SIZES: [u64; 9] = [1, 512, 5000, 30_000, 40_000, 64 << 10, 200_000, MIB, 9 * MIB];

    fn heap(virtual_memory: bool) -> (BooksDriver, Heap<BooksDriver>) {
        let driver = BooksDriver::new(Options { memory: 2 << 30, virtual_memory, ..Options::default() });
        let mut heap = Heap::new(driver.clone(), Config::lean()).unwrap();
        heap.retain_pool(POOL);
        (driver, heap)
    }

    fn sound(heap: &Heap<BooksDriver>) {
        if let Err(error) = heap.check() {
            panic!("{error}");
        }
    }

    /// Runs `f` with requests of both streams going to the pool.
    fn recording<T>(heap: &mut Heap<BooksDriver>, f: impl FnOnce(&mut Heap<BooksDriver>) -> T) -> T {
        heap.begin_pool(POOL, Box::new(|stream| stream == S1 || stream == S2)).unwrap();
        let done = f(heap);
        heap.end_pool(POOL).unwrap();
        heap.release_pool(POOL).unwrap();
        done
    }

    /// Blocks of all sizes on both streams.
    fn blocks(heap: &mut Heap<BooksDriver>, tag: u64) -> Vec<Address> {
        recording(heap, |heap| {
            let each = (0..12).flat_map(|_| SIZES).flat_map(|size| [(size, S1), (size, S2)]);
            each.enumerate().map(|(i, (size, s))| heap.malloc(size, s, Tag(tag, i as u64)).unwrap()).collect()
        })
    }

    fn live(heap: &Heap<BooksDriver>) -> Vec<BlockInfo> {
        let mut found = Vec::new();
        heap.for_each_live(|block| {
            if block.pool == POOL {
                found.push(block);
            }
        });
        found.sort_unstable_by_key(|block| block.address);
        found
    }

    fn free(heap: &mut Heap<BooksDriver>, blocks: impl IntoIterator<Item = Address>) {
        for at in blocks {
            heap.free(at).unwrap();
        }
    }

    #[test]
    fn a_pool_is_put_back_to_the_last_slot() {
        for virtual_memory in [true, false] {
            let (driver, mut heap) = heap(virtual_memory);
            let first = blocks(&mut heap, 1);
            free(&mut heap, first.iter().copied().step_by(3));
            let checkpoint = heap.checkpoint(POOL).unwrap();
            let then = live(&heap);
            assert!(checkpoint.blocks().eq(&then) && checkpoint.pool() == POOL && !then.is_empty());

            // The same pool in another life: everything freed, slabs gone, other sizes in their places.
            free(&mut heap, then.iter().map(|block| block.address));
            recording(&mut heap, |heap| {
                for i in 1..300 {
                    heap.malloc(i * 1731 % 90_000 + 1, S1, Tag(2, i)).unwrap();
                    heap.malloc(i * 77_777 % (9 * MIB), S2, Tag(3, i)).unwrap();
                }
            });
            let now = live(&heap);
            sound(&heap);
            let restored = heap.restore(&checkpoint).unwrap();
            sound(&heap);
            assert_eq!((&restored.freed, &restored.allocated), (&now, &then));
            assert_eq!(live(&heap), then);
            assert_eq!((restored.gone().count(), restored.back().count()), (now.len(), then.len()));

            // Again, and nothing is different.
            let again = heap.restore(&checkpoint).unwrap();
            sound(&heap);
            assert_eq!((&again.freed, &again.allocated), (&then, &then));
            assert_eq!((again.gone().count(), again.back().count()), (0, 0));

            // What was put back is freed like any other block, and the pool can serve more.
            blocks(&mut heap, 4);
            sound(&heap);
            let all = live(&heap);
            free(&mut heap, all.iter().map(|block| block.address));
            heap.release_pool(POOL).unwrap();
            heap.trim();
            sound(&heap);
            assert_eq!((heap.reserved(), driver.created(), driver.violations()), (0, 0, 0));
        }
    }

    #[test]
    fn no_other_pool_is_touched() {
        let (_, mut heap) = heap(true);
        let (s1, other) = (S1, PoolId(0, 4));
        let outside: Vec<Address> =
            SIZES.iter().map(|&size| heap.malloc(size, S1, Tag(8, 8)).unwrap()).collect();
        heap.begin_pool(other, Box::new(move |stream| stream == s1)).unwrap();
        let elsewhere = heap.malloc(5000, S1, Tag(9, 9)).unwrap();
        heap.end_pool(other).unwrap();
        let checkpoint = heap.checkpoint(POOL);
        assert_eq!(checkpoint.unwrap().blocks().len(), 0, "a pool that is held and has no blocks");
        let empty = heap.checkpoint(POOL).unwrap();
        let inside = blocks(&mut heap, 1);
        assert_eq!(heap.restore(&empty).unwrap().freed.len(), inside.len());
        sound(&heap);
        assert_eq!(live(&heap), []);
        for at in outside.into_iter().chain([elsewhere]) {
            heap.free(at).unwrap();
        }
    }

    #[test]
    fn pages_of_a_held_pool_stay_however_scarce_memory_is() {
        let (driver, mut heap) = heap(true);
        let inside = blocks(&mut heap, 1);
        let checkpoint = heap.checkpoint(POOL).unwrap();
        free(&mut heap, inside);
        driver.set_memory(driver.created() + 64 * MIB);
        let mut eager = Vec::new();
        while let Ok(at) = heap.malloc(3 * MIB, S1, Tag(5, 5)) {
            eager.push(at);
        }
        heap.trim();
        let calls = driver.calls().of(Call::Map);
        heap.restore(&checkpoint).unwrap();
        assert_eq!(driver.calls().of(Call::Map), calls, "nothing was missing");
        sound(&heap);
        let at = checkpoint.blocks().map(|block| block.address);
        assert!(at.into_iter().all(|at| driver.is_mapped(at)));
        free(&mut heap, eager);
    }

    #[test]
    fn other_streams_are_waited_for_and_known_again() {
        let (driver, mut heap) = heap(true);
        let inside = blocks(&mut heap, 1);
        let (waiting, used, kept) = (inside[0], inside[2], inside[4]);
        heap.record_stream(kept, Stream(7)).unwrap();
        let checkpoint = heap.checkpoint(POOL).unwrap();
        for at in [waiting, used] {
            heap.record_stream(at, Stream(7)).unwrap();
        }
        driver.submit(Stream(7));
        heap.free(waiting).unwrap();
        assert_eq!(heap.block_at(waiting).unwrap().state, super::super::BlockState::PendingFree);
        let restored = heap.restore(&checkpoint).unwrap();
        sound(&heap);
        assert_eq!(driver.outstanding(Stream(7)), 0, "its work was waited for");
        assert!(!restored.freed.iter().any(|block| block.address == waiting));
        assert_eq!(live(&heap).len(), inside.len());
        // The block that another stream used at the checkpoint is used by it again; the others are not.
        driver.submit(Stream(7));
        free(&mut heap, [waiting, used, kept]);
        let state = |at| heap.block_at(at).map(|block| block.state);
        assert_eq!((state(waiting), state(used)), (None, None));
        assert_eq!(state(kept), Some(super::super::BlockState::PendingFree));
        sound(&heap);
    }

    #[test]
    fn what_cannot_be_waited_for_changes_nothing() {
        let (driver, mut heap) = heap(true);
        let inside = blocks(&mut heap, 1);
        let checkpoint = heap.checkpoint(POOL).unwrap();
        heap.record_stream(inside[0], Stream(7)).unwrap();
        let before = live(&heap);
        let refused = |heap: &mut Heap<BooksDriver>| {
            let error = heap.restore(&checkpoint).unwrap_err();
            assert!(error.to_string().contains("other streams may still use"), "{error}");
            assert_eq!(live(heap), before);
            sound(heap);
        };
        heap.begin_pool(PoolId(9, 0), Box::new(|stream| stream == Stream(9))).unwrap();
        refused(&mut heap);
        heap.end_pool(PoolId(9, 0)).unwrap();
        let error = DriverError::Failed { call: "a wait", code: 1 };
        driver.fail(Some(Call::SynchronizeDevice), 1, error);
        refused(&mut heap);
        driver.clear_faults();
        heap.restore(&checkpoint).unwrap();
        sound(&heap);
        assert_eq!(driver.violations(), 0);
    }

    #[test]
    fn a_pool_that_nobody_holds_is_refused() {
        let (_, mut heap) = heap(true);
        let inside = blocks(&mut heap, 1);
        let checkpoint = heap.checkpoint(POOL).unwrap();
        for id in [PoolId(0, 0), PoolId(0, 77)] {
            assert!(matches!(heap.checkpoint(id), Err(HeapError::Pool { .. })));
        }
        heap.release_pool(POOL).unwrap();
        assert!(heap.restore(&checkpoint).is_err() && heap.checkpoint(POOL).is_err());
        assert_eq!(live(&heap).len(), inside.len());
        // A block stays, so the pool does, but idle pages go; then somebody holds it again.
        let (last, others) = inside.split_last().unwrap();
        free(&mut heap, others.iter().copied());
        heap.trim();
        heap.retain_pool(POOL);
        let error = heap.restore(&checkpoint).unwrap_err();
        assert!(error.to_string().contains("lost memory"), "{error}");
        assert_eq!(live(&heap).len(), 1);
        sound(&heap);
        free(&mut heap, [*last]);
        // Now it goes for good, and another pool has its name: perhaps at the same addresses.
        heap.release_pool(POOL).unwrap();
        heap.trim();
        assert!(heap.restore(&checkpoint).is_err());
        heap.retain_pool(POOL);
        let fewer = recording(&mut heap, |heap| heap.malloc(512, S1, Tag(6, 6)).unwrap());
        assert!(heap.restore(&checkpoint).is_err());
        assert_eq!(live(&heap).len(), 1);
        free(&mut heap, [fewer]);
        sound(&heap);
    }
}
