//! The JSON of candidates and answers, as include/strandline.h states it.
//!
//! Must not know: which language reads it.
//! Invariant: at most [`SHOWN`] blocks per candidate: oldest, newest and between.

use super::findings::{Answer, Case};
use super::judge::Judge;
use super::pattern::{MATURE, Shape};
use super::symbols::{Frame, Symbols};
use super::tag::Tag;
use serde::Serialize;

/// Most blocks shown of one candidate.
pub const SHOWN: usize = 16;

/// A live block as the heap knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LiveBlock {
    pub address: u64,
    pub size: u64,
    pub tag: Tag,
}

#[derive(Serialize)]
struct CandidateJson {
    id: u64,
    class: &'static str,
    /// "steady", "regrow", "periodic", "irregular" or "burst".
    shape: &'static str,
    device: i32,
    live_bytes: u64,
    live_blocks: u64,
    bytes_per_step: f64,
    /// How often this site's growth was explained away before.
    asked: u32,
    allocated_at: Option<Frame>,
    stack: Vec<Frame>,
    blocks: Vec<BlockJson>,
}

#[derive(Serialize)]
struct BlockJson {
    address: u64,
    size: u64,
    step: u32,
}

/// Why an answer was not taken.
#[derive(Debug)]
pub enum Refused {
    /// The text is not the JSON object of strandline.h.
    NotJson(serde_json::Error),
    /// No candidate has this id.
    NoSuchCandidate,
}

impl Judge {
    /// The candidates as JSON. `blocks` lists a site's live blocks (device, site number).
    pub fn candidates_json(
        &mut self,
        symbols: &dyn Symbols,
        mut blocks: impl FnMut(i32, u32) -> Vec<LiveBlock>,
    ) -> String {
        let ended = self.steps().saturating_sub(1);
        let taken = self.take_candidates();
        candidates_to_json(&taken, ended, symbols, &mut blocks)
    }

    /// Takes an answer as JSON.
    pub fn explain_json(&mut self, id: u64, answer: &str) -> Result<(), Refused> {
        let answer: Answer = serde_json::from_str(answer).map_err(Refused::NotJson)?;
        if self.explain(id, answer) { Ok(()) } else { Err(Refused::NoSuchCandidate) }
    }
}

/// Candidates already taken, as JSON: for callers that must not hold the judge while blocks are listed.
pub fn candidates_to_json(
    taken: &[Case],
    ended: u32,
    symbols: &dyn Symbols,
    blocks: &mut dyn FnMut(i32, u32) -> Vec<LiveBlock>,
) -> String {
    let shown: Vec<CandidateJson> = taken
        .iter()
        .map(|case| CandidateJson {
            id: case.id,
            class: case.pattern.class.name(),
            shape: shape_name(case.pattern.shape),
            device: case.device,
            live_bytes: case.live_bytes,
            live_blocks: case.live_blocks,
            bytes_per_step: case.pattern.bytes_per_step,
            asked: case.asked,
            allocated_at: symbols.allocated_at(case.stack),
            stack: symbols.frames(case.stack),
            blocks: pick(case, blocks(case.device, case.site), ended),
        })
        .collect();
    serde_json::to_string(&shown).unwrap_or_else(|_| "[]".to_owned())
}

pub(crate) fn shape_name(shape: Shape) -> &'static str {
    match shape {
        Shape::Steady => "steady",
        Shape::Regrow => "regrow",
        Shape::Periodic { .. } => "periodic",
        Shape::Irregular => "irregular",
        Shape::Burst => "burst",
    }
}

/// Survivors of the case, oldest, newest and between; where there is none (a block that regrows), any.
fn pick(case: &Case, mut blocks: Vec<LiveBlock>, ended: u32) -> Vec<BlockJson> {
    let survivor = |block: &LiveBlock| {
        block.tag.step() + MATURE <= ended
            && (case.pattern.shape != Shape::Burst || block.tag.step() >= case.pattern.first)
    };
    if case.pattern.shape != Shape::Regrow && blocks.iter().any(survivor) {
        blocks.retain(survivor);
    }
    blocks.sort_unstable_by_key(|block| (block.tag.step(), block.tag.serial()));
    let last = blocks.len().saturating_sub(1);
    let shown = blocks.len().min(SHOWN);
    (0..shown)
        .map(|at| blocks[if shown < 2 { 0 } else { at * last / (shown - 1) }])
        .map(|block| BlockJson { address: block.address, size: block.size, step: block.tag.step() })
        .collect()
}
