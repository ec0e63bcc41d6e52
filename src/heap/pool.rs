//! Private pools: memory of CUDA graphs and of PyTorch's MemPool, kept apart from everybody's.
//!
//! While a pool is being recorded to, requests on streams that its filter accepts go to the pool's own
//! lanes. A pool's pages stay its own until it was released as often as it was begun; then its idle pages
//! may be taken, and it vanishes when its last block is freed. It knows who gets what, not how.
//! Invariant: pool 0 is everybody's and never vanishes.

use super::config::{HeapError, PoolId};
use super::{Driver, Heap, Stream};

/// Whether a request on a stream belongs to the pool.
pub type Filter = Box<dyn Fn(Stream) -> bool + Send>;

pub(super) struct Pool {
    pub id: PoolId,
    /// How often it was begun and not released.
    pub holds: u64,
    pub in_use: bool,
}

/// One recording under way.
struct Route {
    pool: u32,
    filter: Filter,
    /// Whether it is a capture; not known before its first request.
    capture: Option<bool>,
}

pub(super) struct Pools {
    pub list: Vec<Pool>,
    routes: Vec<Route>,
}

impl Pools {
    pub(super) fn new() -> Self {
        Pools { list: vec![Pool { id: PoolId(0, 0), holds: 1, in_use: true }], routes: Vec::new() }
    }

    /// A recording whose first request has not come counts as a capture: a wrong query would spoil it.
    #[inline]
    pub(super) fn capturing(&self) -> bool {
        self.routes.iter().any(|route| route.capture != Some(false))
    }

    #[inline]
    pub(super) fn recording(&self) -> bool {
        !self.routes.is_empty()
    }

    pub(super) fn find(&self, id: PoolId) -> Option<u32> {
        self.list.iter().position(|pool| pool.in_use && pool.id == id).map(|index| index as u32)
    }

    /// Whether pages of a pool may be used elsewhere.
    pub(super) fn open(&self, pool: u32) -> bool {
        pool == 0 || self.list[pool as usize].holds == 0
    }

    fn find_or_make(&mut self, id: PoolId) -> u32 {
        if let Some(pool) = self.find(id) {
            return pool;
        }
        let pool = Pool { id, holds: 0, in_use: true };
        match self.list.iter().position(|pool| !pool.in_use) {
            Some(index) => {
                self.list[index] = pool;
                index as u32
            }
            None => {
                self.list.push(pool);
                (self.list.len() - 1) as u32
            }
        }
    }
}

impl<D: Driver> Heap<D> {
    /// Starts recording to a pool (made if it is new): from now on requests on streams that `filter`
    /// accepts are served from it. Holds the pool until [`release_pool`](Self::release_pool).
    ///
    /// # Errors
    /// [`HeapError::Pool`] if the pool is being recorded to already.
    pub fn begin_pool(&mut self, id: PoolId, filter: Filter) -> Result<(), HeapError> {
        let pool = self.pools.find_or_make(id);
        if self.pools.routes.iter().any(|route| route.pool == pool) {
            return Err(HeapError::Pool { id, why: "is being recorded to already" });
        }
        self.pools.list[pool as usize].holds += 1;
        self.pools.routes.push(Route { pool, filter, capture: None });
        self.last = None;
        Ok(())
    }

    /// Ends recording to a pool; its memory stays its own.
    ///
    /// # Errors
    /// [`HeapError::Pool`] if the pool is not being recorded to.
    pub fn end_pool(&mut self, id: PoolId) -> Result<(), HeapError> {
        let pool = self.pools.find(id);
        match self.pools.routes.iter().position(|route| Some(route.pool) == pool) {
            Some(index) => {
                self.pools.routes.remove(index);
                Ok(())
            }
            None => Err(HeapError::Pool { id, why: "is not being recorded to" }),
        }
    }

    /// Holds a pool (made if it is new) without recording to it.
    pub fn retain_pool(&mut self, id: PoolId) {
        let pool = self.pools.find_or_make(id);
        self.pools.list[pool as usize].holds += 1;
    }

    /// Takes one hold back. After the last one the pool's idle pages may be used elsewhere, once the
    /// device has done its work; its live blocks stay valid until they are freed.
    ///
    /// # Errors
    /// [`HeapError::Pool`] if the pool is not known or not held.
    pub fn release_pool(&mut self, id: PoolId) -> Result<(), HeapError> {
        let pool = self.pools.find(id).filter(|&pool| pool != 0 && self.pools.list[pool as usize].holds > 0);
        let Some(pool) = pool else { return Err(HeapError::Pool { id, why: "is not held" }) };
        self.pools.list[pool as usize].holds -= 1;
        if self.pools.list[pool as usize].holds == 0 {
            for lane in self.lanes.iter_mut().filter(|lane| lane.in_use && lane.pool == pool) {
                lane.loud = true;
            }
            self.sweep_pools();
        }
        Ok(())
    }

    /// Whether any pool is being recorded to, so that a capture may be under way.
    pub fn is_recording(&self) -> bool {
        self.pools.recording()
    }

    /// The pool's holds; none if it is not known.
    pub fn pool_holds(&self, id: PoolId) -> Option<u64> {
        self.pools.find(id).map(|pool| self.pools.list[pool as usize].holds)
    }

    /// The pool that a request on a stream belongs to. Asked only while a recording is under way.
    pub(super) fn route(&mut self, stream: Stream) -> u32 {
        let Some(index) = self.pools.routes.iter().rposition(|route| (route.filter)(stream)) else {
            return 0;
        };
        let pool = self.pools.routes[index].pool;
        if self.pools.routes[index].capture.is_none() {
            // A driver that cannot tell is taken to be capturing.
            let capture = self.driver.is_capturing(stream).unwrap_or(true);
            self.pools.routes[index].capture = Some(capture);
        }
        pool
    }

    /// Lets go of lanes and pools of which nothing is left.
    pub(super) fn sweep_pools(&mut self) {
        for pool in 1..self.pools.list.len() as u32 {
            let entry = &self.pools.list[pool as usize];
            if !entry.in_use || entry.holds > 0 || self.pools.routes.iter().any(|route| route.pool == pool) {
                continue;
            }
            let mut left = false;
            for index in 0..self.lanes.len() {
                if self.lanes[index].in_use && self.lanes[index].pool == pool {
                    left |= !self.close_lane(index);
                }
            }
            if !left {
                self.pools.list[pool as usize].in_use = false;
            }
        }
    }
}
