//! Torch's statistics and snapshot: the structs that the service fills, and their forms for torch.
//!
//! Must not know: where the numbers come from. Invariants: [`Stats`] has exactly the layout of torch's
//! `DeviceStats` of versions 2.4 to 2.11 (tests/cuda_layouts.cpp compares them); the JSON forms have the
//! keys that `torch._C._cuda_memoryStats` and `_cuda_memorySnapshot` return.

use serde::Serialize;
use std::collections::BTreeMap;

/// One counter: torch's `Stat`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Stat {
    pub current: i64,
    pub peak: i64,
    pub allocated: i64,
    pub freed: i64,
}

/// A counter for all blocks, those of small requests (≤ 1 MiB), and those of large ones: `StatArray`.
pub type StatArray = [Stat; 3];

/// Everything that `torch.cuda.memory_stats()` reports: torch's `DeviceStats`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    pub allocation: StatArray,
    pub segment: StatArray,
    pub active: StatArray,
    pub inactive_split: StatArray,
    pub allocated_bytes: StatArray,
    pub reserved_bytes: StatArray,
    pub active_bytes: StatArray,
    pub inactive_split_bytes: StatArray,
    pub requested_bytes: StatArray,
    pub num_alloc_retries: i64,
    pub num_ooms: i64,
    pub oversize_allocations: Stat,
    pub oversize_segments: Stat,
    pub num_sync_all_streams: i64,
    pub num_device_alloc: i64,
    pub num_device_free: i64,
    /// -1: no limit.
    pub max_split_size: i64,
}

impl Stats {
    /// The nested form, `{"allocated_bytes": {"all": {"current": …}}, …, "num_ooms": …}`.
    pub fn to_json(&self) -> serde_json::Value {
        let arrays = [
            ("allocation", &self.allocation),
            ("segment", &self.segment),
            ("active", &self.active),
            ("inactive_split", &self.inactive_split),
            ("allocated_bytes", &self.allocated_bytes),
            ("reserved_bytes", &self.reserved_bytes),
            ("active_bytes", &self.active_bytes),
            ("inactive_split_bytes", &self.inactive_split_bytes),
            ("requested_bytes", &self.requested_bytes),
        ];
        let mut json = serde_json::Map::new();
        for (name, [all, small, large]) in arrays {
            let pools = serde_json::json!({ "all": all, "small_pool": small, "large_pool": large });
            json.insert(name.into(), pools);
        }
        json.insert("oversize_allocations".into(), serde_json::json!(self.oversize_allocations));
        json.insert("oversize_segments".into(), serde_json::json!(self.oversize_segments));
        let numbers = [
            ("num_alloc_retries", self.num_alloc_retries),
            ("num_ooms", self.num_ooms),
            ("num_sync_all_streams", self.num_sync_all_streams),
            ("num_device_alloc", self.num_device_alloc),
            ("num_device_free", self.num_device_free),
            ("max_split_size", self.max_split_size),
        ];
        for (name, number) in numbers {
            json.insert(name.into(), number.into());
        }
        serde_json::Value::Object(json)
    }
}

/// One line of a stack, as torch's snapshots name it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Frame {
    pub name: String,
    pub filename: String,
    pub line: u32,
}

/// A part of a segment. The blocks of a segment follow each other without gaps.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct BlockInfo {
    pub address: u64,
    pub size: u64,
    pub requested_size: u64,
    /// `active_allocated`, `active_pending_free` or `inactive`.
    pub state: &'static str,
    pub frames: Vec<Frame>,
}

/// A segment with its blocks. A mapped run of an expandable segment is one of these.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct SegmentInfo {
    pub device: i32,
    pub address: u64,
    pub total_size: u64,
    pub allocated_size: u64,
    pub active_size: u64,
    pub requested_size: u64,
    pub stream: u64,
    /// `small` or `large`.
    pub segment_type: &'static str,
    pub segment_pool_id: (u64, u64),
    pub is_expandable: bool,
    pub frames: Vec<Frame>,
    pub blocks: Vec<BlockInfo>,
}

/// A past event.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct TraceEntry {
    /// `alloc`, `free_requested`, `free_completed`, `segment_alloc`, `segment_free`, `segment_map`,
    /// `segment_unmap`, `snapshot` or `oom`.
    pub action: &'static str,
    /// For `oom`: the device's free bytes (Python names the key `device_free` then).
    pub addr: u64,
    pub size: u64,
    pub stream: u64,
    pub time_us: u64,
    /// A key of [`Snapshot::stacks`]; 0 is none.
    pub stack: u32,
}

/// What `torch.cuda.memory._snapshot()` is made from.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Snapshot {
    /// By address.
    pub segments: Vec<SegmentInfo>,
    /// One list per device index.
    pub device_traces: Vec<Vec<TraceEntry>>,
    /// The stacks of the traces; each may be named by many of their entries.
    pub stacks: BTreeMap<u32, Vec<Frame>>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statistics_have_torchs_size_and_keys() {
        // 9 arrays of 3 counters of 4 numbers, 2 counters, 6 numbers: 122 words of 8 bytes.
        assert_eq!(std::mem::size_of::<Stats>(), (9 * 12 + 2 * 4 + 6) * 8);
        let json = Stats::default().to_json();
        assert_eq!(json.as_object().unwrap().len(), 17);
        assert_eq!(json["requested_bytes"]["large_pool"]["freed"], 0);
        assert_eq!(json["oversize_segments"]["peak"], 0);
    }
}
