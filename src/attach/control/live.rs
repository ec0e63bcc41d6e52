//! What a job answers to who watches it: the report's figures in short, and the devices as they are now.
//!
//! Takes the locks that a report takes, in the same order. Invariant: a device is locked for one walk over
//! its blocks; calls no driver.

use crate::attach::gpu::Gpus;
use crate::attach::outcome::Reason;
use crate::attach::process::State;
use crate::attach::served::Served;
use crate::driver::Driver;
use crate::report::live::{Live, LiveDevice};

impl State {
    /// The run now, with the largest `sites` and maps of at most `cells` cells.
    pub(super) fn live(&self, sites: usize, cells: usize) -> Live {
        let mut live = Live::of(self.assemble(Reason::Asked), sites);
        let now = self.clock.now();
        live.phase = self.clock.phase_name(now.phase);
        live.steps = live.steps.max(u64::from(now.step));
        live.epoch = live.epoch.max(u64::from(now.epoch));
        live.metrics = crate::attach::metrics::server::url().map(str::to_owned);
        live.seconds = self.began.elapsed().as_secs_f64();
        if let Some(host) = &self.host {
            look(host, cells, &mut live.devices);
        }
        for served in self.gpus.into_iter().flat_map(Gpus::open) {
            look(served, cells, &mut live.devices);
        }
        live
    }
}

fn look<D: Driver>(served: &Served<D>, cells: usize, devices: &mut [LiveDevice]) {
    let Some(device) = devices.iter_mut().find(|device| device.device == i64::from(served.device())) else {
        return;
    };
    let Some(books) = served.books() else { return };
    let stats = books.heap.stats();
    let seen = books.heap.occupancy(cells);
    drop(books);
    device.allocated = stats.allocated_bytes.all.current;
    device.reserved = stats.reserved_bytes.all.current;
    device.cell_bytes = seen.cell_bytes;
    device.largest_free = seen.largest_free;
    let last = seen.used.len().saturating_sub(1);
    let percent = |(at, &used): (usize, &u64)| {
        let size = if at == last { seen.mapped - seen.cell_bytes * last as u64 } else { seen.cell_bytes };
        (used * 100).div_ceil(size.max(1)).min(100) as u8
    };
    device.map = seen.used.iter().enumerate().map(percent).collect();
}
