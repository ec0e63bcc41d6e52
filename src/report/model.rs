//! The report model: what every form of a report is made from, and the JSON contract that tools rely on.
//!
//! Must not know: how its contents were found, how they are shown.
//! Invariant: schema 1 only gains keys; what a reader does not know it skips, what is missing has a default.

use crate::ledger::{Bounded, Frame, Holder, Kept};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// The schema this program writes and reads.
pub const SCHEMA: u32 = 1;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    Leak,
    Fragmentation,
    Clean,
    #[default]
    Undecided,
}

impl Verdict {
    pub fn name(self) -> &'static str {
        match self {
            Verdict::Leak => "leak",
            Verdict::Fragmentation => "fragmentation",
            Verdict::Clean => "clean",
            Verdict::Undecided => "undecided",
        }
    }
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Report {
    pub schema: u32,
    pub verdict: Verdict,
    pub reason: String,
    pub run: Run,
    #[serde(default)]
    pub devices: Vec<Device>,
    pub findings: Vec<Finding>,
    #[serde(default)]
    pub not_leaks: Vec<NotLeak>,
    /// Growth that was not seen long enough.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub undecided: Vec<Undecided>,
    /// What is worth knowing and is no finding of the ledger's.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub remarks: Vec<Remark>,
    #[serde(default)]
    pub sites: Vec<Site>,
}

/// Remarks that speak of growth which no block shows.
const DOUBTFUL: [&str; 2] = ["growing-graph", "repeated-hooks"];

impl Report {
    /// The report with what else is worth knowing. Where a graph grows with the steps, or hooks that each keep
    /// something, nothing is called clean: host memory grows that no tensor has, or ever more blocks of one step.
    pub fn with_remarks(mut self, remarks: Vec<Remark>) -> Report {
        let grows = remarks.iter().find(|remark| DOUBTFUL.contains(&remark.kind.as_str()));
        if let Some(grows) = grows.filter(|_| self.verdict == Verdict::Clean) {
            self.verdict = Verdict::Undecided;
            self.reason = format!("no tensor accumulated in {} steps, but {}", self.run.steps, grows.what);
        }
        self.remarks = remarks;
        self
    }
}

fn is_zero(number: &u64) -> bool {
    *number == 0
}

/// The run that the report is about.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Run {
    pub command: Vec<String>,
    pub pid: u32,
    /// The process, by its number and its start: numbers are used again.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub process: String,
    /// The processes that started it, likewise; the nearest first.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub launched_by: Vec<String>,
    pub rank: i64,
    pub world_size: i64,
    /// "heap", "observer", "host" or "replay".
    pub mode: String,
    pub steps: u64,
    pub epochs: u64,
    /// The median duration of recent steps.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub step_seconds: Option<f64>,
    /// Why the report was written: "exit", "asked", "out of memory", "finding", "crash".
    #[serde(skip_serializing_if = "String::is_empty")]
    pub written: String,
    /// Children that it forked, in which nothing is watched.
    #[serde(skip_serializing_if = "is_zero")]
    pub forked: u64,
    /// How many reports of the run's own folder had been asked for. One that was asked for may be replaced at once by
    /// one with a finding, which answers as well; this tells it from one that was begun before.
    #[serde(skip_serializing_if = "is_zero")]
    pub asked: u64,
    /// What ended the job, in a report of a crash.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub crash: Option<Crash>,
    /// Seconds since 1970 at which it was written.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub time: Option<u64>,
    /// The library that the text of the report is about (`--focus`).
    #[serde(skip_serializing_if = "String::is_empty")]
    pub focus: String,
    /// `[epoch, step]`: the newest epochs and the steps that were running when they began.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub epoch_starts: Vec<(u32, u32)>,
    /// The newest steps that were running when a validation began.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub validations: Vec<u32>,
    /// Whatever else the writer knows: versions, host name, options.
    #[serde(flatten)]
    pub more: Map<String, Value>,
}

/// The signal that ended a job.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Crash {
    /// Its name, "SIGSEGV".
    pub signal: String,
    /// The thread that it came to, by number and name.
    pub thread: u32,
    pub thread_name: String,
    /// The address that could not be used, or of the instruction.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub address: Option<String>,
    /// The other process that sent it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sent_by: Option<u32>,
    /// What the report does not have, because it was not to be had.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub left_out: Vec<String>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Device {
    pub device: i64,
    /// The keys of torch.cuda.memory_stats().
    pub stats: Map<String, Value>,
    pub outside_bytes: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub total_bytes: Option<u64>,
    pub live_bytes: u64,
    pub live_blocks: u64,
    /// Sites known, of which the report lists the largest.
    pub sites: u64,
    pub peak_bytes: u64,
    pub peak_step: u64,
    /// `[epoch, peak bytes]`.
    pub epoch_peaks: Vec<(u32, u64)>,
    /// Live bytes and bytes ever allocated by phase of birth.
    pub phases: Vec<PhaseBytes>,
    pub series: Vec<SeriesPoint>,
    /// Stretches of the run with minimum, mean and maximum.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub windows: Vec<Window>,
    /// What was allocated and freed in the recent part of the run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub flow: Option<Flow>,
    /// Runs of mapped memory, the largest of them, by address; empty where the allocator is not strandline's.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub segments: Vec<Segment>,
    /// Segments that were too many to list, and their bytes.
    #[serde(skip_serializing_if = "is_none_left_out")]
    pub segments_left_out: (u64, u64),
}

impl Device {
    /// Bytes allocated at the last step boundary: what the end of the program frees changes nothing. Before the first
    /// boundary, what lives now; None where nothing is known.
    pub fn allocated(&self) -> Option<u64> {
        self.series.last().map(|point| point.allocated).or((self.live_bytes > 0).then_some(self.live_bytes))
    }
}

/// Neighbouring step boundaries, taken together; bytes as `[minimum, mean, maximum]`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Window {
    pub first_step: u32,
    pub last_step: u32,
    pub allocated: [u64; 3],
    pub reserved: [u64; 3],
    pub active: [u64; 3],
    /// The highest requested bytes within any of its steps.
    pub peak: u64,
    pub retries: u64,
}

/// What was allocated and freed in the last `steps` steps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Flow {
    pub steps: u32,
    pub allocated_blocks: u64,
    pub freed_blocks: u64,
    pub allocated_bytes: u64,
    pub freed_bytes: u64,
}

fn is_none_left_out(left_out: &(u64, u64)) -> bool {
    left_out.0 == 0
}

/// A run of mapped memory without a gap.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Segment {
    pub address: u64,
    /// The sum of its runs.
    pub size: u64,
    pub stream: u64,
    /// For requests above 1 MiB.
    pub large: bool,
    /// In address order, without gaps.
    pub runs: Vec<BlockRun>,
}

/// `[bytes, bytes in use, stack ID, step]`: a block, a gap, or neighbours that were joined to keep the report
/// small. Stack and step of birth are those of the largest block in it; 0 where nothing is in use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlockRun(pub u64, pub u64, pub u32, pub u32);

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PhaseBytes {
    pub phase: String,
    pub live_bytes: u64,
    pub allocated_bytes: u64,
    /// In the recent part of the run (`Device.flow`): bytes allocated and freed while the phase was in force.
    #[serde(default)]
    pub recent_allocated: u64,
    #[serde(default)]
    pub recent_freed: u64,
}

/// The device at a step boundary, in bytes; `peak` is the highest from this step up to the next point.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct SeriesPoint {
    pub step: u32,
    pub allocated: u64,
    pub reserved: u64,
    pub active: u64,
    pub peak: u64,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Finding {
    pub class: crate::ledger::Class,
    pub confidence: f64,
    #[serde(default)]
    pub device: i64,
    pub live_bytes: u64,
    pub live_blocks: u64,
    pub bytes_per_step: f64,
    pub bytes_per_epoch: f64,
    /// Events differ in size: the rates are means.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub uneven: bool,
    pub evidence: String,
    pub released_by: String,
    pub allocated_at: Option<Frame>,
    pub stack: Vec<Frame>,
    pub called_at_step: u32,
    pub held_by: Option<Holder>,
    /// Why nobody is named who holds it, where that was not even looked for.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub holder_note: String,
    pub kept_at: Option<Kept>,
    pub fix: String,
    #[serde(default)]
    pub id: u64,
    /// How the survivors came about: "steady", "regrow", "periodic", "irregular", "burst" or "reserved".
    #[serde(default)]
    pub shape: String,
    /// The phase in which the blocks were allocated.
    #[serde(default)]
    pub phase: String,
    #[serde(default)]
    pub first_step: u32,
    #[serde(default)]
    pub last_step: u32,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub forecast: Option<Forecast>,
    /// What a per-epoch rate counts by: "epoch", or "10 steps" where a rhythm has nothing to do with epochs.
    #[serde(default)]
    pub per: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bounded: Option<Bounded>,
    /// Newest steps in which a block was born that is still alive.
    #[serde(default)]
    pub births: Vec<u32>,
    /// Every site of this finding, the leading one first.
    #[serde(default)]
    pub sites_in_finding: Vec<SiteInFinding>,
    /// `[step, live bytes, live blocks]` of the leading site.
    #[serde(default)]
    pub series: Vec<(u32, u64, u64)>,
}

/// When the device's memory is used up, if the finding goes on as it does.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Forecast {
    pub at_step: u64,
    pub steps: u64,
    pub seconds: Option<f64>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SiteInFinding {
    pub class: crate::ledger::Class,
    pub live_bytes: u64,
    pub live_blocks: u64,
    pub bytes_per_step: f64,
    pub allocated_at: Option<Frame>,
    #[serde(default)]
    pub stack_id: u32,
}

/// "Not a leak, because …" is a result too.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct NotLeak {
    /// The reason's heading in docs/findings.md.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub kind: String,
    pub what: String,
    pub because: String,
    pub device: i64,
    pub bytes: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub allocated_at: Option<Frame>,
    /// It was called a finding for a while.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub withdrawn: bool,
}

/// Growth that was not seen long enough, and what would decide it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Undecided {
    pub what: String,
    pub decides: String,
    pub device: i64,
    pub bytes: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub allocated_at: Option<Frame>,
}

/// What is worth knowing and is no finding of the ledger's.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Remark {
    /// Its heading in docs/findings.md.
    pub kind: String,
    pub what: String,
    pub because: String,
    pub fix: String,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Site {
    pub device: i64,
    pub stack_id: u32,
    pub allocated_at: Option<Frame>,
    pub stack: Vec<Frame>,
    /// At the last step boundary.
    pub live_bytes: u64,
    pub live_blocks: u64,
    pub allocated_bytes: u64,
    pub allocated_blocks: u64,
    pub freed_bytes: u64,
    pub freed_blocks: u64,
    pub phase: String,
    pub generations: Vec<Generation>,
    /// `[step, live bytes, live blocks]`.
    pub history: Vec<(u32, u64, u64)>,
}

/// Live blocks born in the steps `first..=last`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Generation {
    pub first: u32,
    pub last: u32,
    pub blocks: u64,
    pub bytes: u64,
}
