//! Where a case stands: it grows, it settled (and why), or the stage of the program is over in which it grew.
//!
//! Must not know: who answers, findings.
//! Invariant: depends on the accounts alone; that a program went on to something else is no reason why what it did
//! before was no leak; the sites of a device are walked at most once a look.

use super::findings::{Case, State, Use};
use super::pace;
use super::pattern::{self, Shape, View};
use super::site::Site;
use super::standing::{Standing, standing};

/// Steps in which a site must have allocated to tell a stage by.
const OFTEN: u16 = 6;
/// Sites that a stage must have had.
const LEAST: usize = 3;
/// Steps without a birth after which a site is quiet.
const QUIET: u32 = 6;
/// Steps between looks at whether an ended stage has come again.
const LOOK_AGAIN: u32 = 32;

/// What is known of the stages of the program. Cases that stopped together ask the same question, and ask it again at
/// every look, so an answer stands for [`LOOK_AGAIN`] steps.
#[derive(Debug, Default)]
pub(super) struct Stages {
    /// The device and the step of the newest walk, and when each site that allocated often did so first and last.
    walked: Option<(i32, u32)>,
    spans: Vec<(u32, u32)>,
    known: Vec<Verdict>,
}

/// Whether a stage ended at `step`, as it looked at `seen`.
#[derive(Clone, Copy, Debug)]
struct Verdict {
    device: i32,
    step: u32,
    slack: u32,
    seen: u32,
    ended: bool,
}

impl Stages {
    /// Whether the stage of the program ended at about `step` in which something grew: most of the sites that
    /// allocated again and again until then do so no longer (they lie in another loop, or another function).
    fn ended(&mut self, device: i32, view: &View, step: u32, period: f64) -> bool {
        let slack = 3 + period as u32;
        let same = |known: &&Verdict| (known.device, known.step, known.slack) == (device, step, slack);
        self.known.retain(|known| known.seen + LOOK_AGAIN > view.ended);
        if let Some(known) = self.known.iter().find(same) {
            return known.ended;
        }
        if self.walked != Some((device, view.ended)) {
            self.walked = Some((device, view.ended));
            self.spans.clear();
            self.spans.extend(view.sites.iter().filter_map(|site| {
                let last = site.last_active(OFTEN)?;
                Some((site.history.points().first().map_or(last, |point| point.0), last))
            }));
        }
        let (mut went, mut stayed) = (0, 0);
        for &(began, last) in &self.spans {
            if began + u32::from(OFTEN) > step || last + slack < step {
                continue; // of another stage
            }
            if last <= step + slack && last + QUIET <= view.ended {
                went += 1;
            } else {
                stayed += 1;
            }
        }
        let ended = went >= LEAST && went > stayed;
        self.known.push(Verdict { device, step, slack, seen: view.ended, ended });
        ended
    }
}

/// Whether a site that shows a pattern for the first time grows now. No stage matters to what never was a case.
pub(super) fn grows(site: &Site, case: &Case, view: &View) -> bool {
    standing(site, &case.pattern, case.measure(), view) == Standing::Growing
}

/// Why a case no longer grows; nothing where it does, and where only its stage ended: then the step of that is
/// noted in the case.
pub(super) fn settled(site: &Site, case: &mut Case, view: &View, stages: &mut Stages) -> Option<String> {
    if case.pattern.shape == Shape::Burst
        && let Some(step) = pattern::came_again(site, &case.pattern, view.ended)
    {
        return Some(format!(
            "it came again in step {step}: no single allocation, and too few times to tell whether it goes on"
        ));
    }
    let most = case.most.max(case.measure());
    let period = if case.pattern.period.is_finite() { case.pattern.period } else { 1.0 };
    let (shape, device) = (case.pattern.shape, case.device);
    let mut stage = |step: u32| shape != Shape::Burst && stages.ended(device, view, step, period);
    match standing(site, &case.pattern, most, view) {
        Standing::Growing => {
            case.over = None;
            case.thins = thins(site, case, view);
            case.thins.map(|[before, lately]| {
                format!("new ones become ever rarer ({before} in the first half, {lately} in the second)")
            })
        }
        Standing::Stopped(step) => {
            let from = case.pattern.first;
            let used = case.used();
            if used < Some(Use::Again) && stage(step) {
                if used == Some(Use::Gathered) {
                    return Some(format!(
                        "grew from step {from} until that stage of the program ended in step {step}, to be read \
                         afterwards: it does not grow; del frees it once it was read"
                    ));
                }
                case.over = Some(step);
                return None;
            }
            Some(format!("grew from step {from} to step {step}, then settled: nothing more stayed since"))
        }
        Standing::Replaces => {
            Some(format!("filled to {} blocks, then new ones replace the oldest", case.live_blocks))
        }
        Standing::Freed if case.pattern.shape == Shape::Burst => {
            Some(format!("kept from step {}, then freed by step {}", case.pattern.first, view.ended))
        }
        Standing::Freed => {
            let collected = u64::from(site.collected) * 2 >= site.late_blocks.max(1);
            let fell = site.last_late;
            let once = site.resets <= 1 && case.pattern.shape != Shape::Regrow && !collected;
            if once && case.used() == Some(Use::Never) && site.cohorts.fresh().last <= fell + 1 {
                // Freed once, all of it. Whether its stage is over shows a few steps later.
                if view.ended < fell + QUIET + 3 {
                    return None;
                }
                if stage(fell) {
                    case.over = Some(fell);
                    return None;
                }
            }
            let what = if case.pattern.shape == Shape::Regrow { "bytes" } else { "blocks" };
            let who =
                if collected { "the garbage collector freed it (reference cycles)" } else { "was freed" };
            Some(format!("grew to {most} {what}, then {who} by step {}", view.ended))
        }
    }
}

/// Events in the first and the second half of a case whose new blocks become ever rarer, as those of a cache that
/// fills. A list has no keys that come again: what is appended to it more rarely is no less a leak.
fn thins(site: &Site, case: &Case, view: &View) -> Option<[u32; 2]> {
    if !matches!(case.pattern.shape, Shape::Steady | Shape::Irregular) || case.keyless {
        return None;
    }
    let pace = pace::between(site, case.pattern.first, view.ended)?;
    let before = case.thins.is_some() || matches!(case.state, State::Withdrawn { .. });
    pace.fell(before).then(|| pace.halves.map(|events| events.round() as u32))
}
