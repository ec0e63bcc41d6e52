//! Where a case stands: it grows, it settled (and why), or the stage of the program is over in which it grew.
//!
//! Must not know: who answers, findings.
//! Invariant: a pure function of the accounts; that a program went on to something else is no reason why what it
//! did before was no leak.

use super::findings::{Case, Use};
use super::pattern::{self, Shape, Standing, View};
use super::site::Site;

/// Steps in which a site must have allocated to tell a stage by.
const OFTEN: u16 = 6;
/// Sites that a stage must have had.
const LEAST: usize = 3;
/// Steps without a birth after which a site is quiet.
const QUIET: u32 = 6;
/// Steps between looks at whether an ended stage has come again.
const LOOK_AGAIN: u32 = 32;

/// Whether the stage of the program ended at about `step` in which something grew: most of the sites that
/// allocated again and again until then do so no longer (they lie in another loop, or another function).
fn ended(view: &View, step: u32, period: f64) -> bool {
    let slack = 3 + period as u32;
    let (mut went, mut stayed) = (0, 0);
    for site in view.sites {
        let Some(last) = site.last_active(OFTEN) else { continue };
        let began = site.history.points().first().map_or(last, |point| point.0);
        if began + u32::from(OFTEN) > step || last + slack < step {
            continue; // of another stage
        }
        if last <= step + slack && last + QUIET <= view.ended {
            went += 1;
        } else {
            stayed += 1;
        }
    }
    went >= LEAST && went > stayed
}

/// Why a case no longer grows; nothing where it does, and where only its stage ended: then the step of that is
/// noted in the case.
pub(super) fn settled(site: &Site, case: &mut Case, view: &View) -> Option<String> {
    let most = case.most.max(case.measure());
    let period = if case.pattern.period.is_finite() { case.pattern.period } else { 1.0 };
    let shape = case.pattern.shape;
    let stage = |step: u32| shape != Shape::Burst && ended(view, step, period);
    if case.over.is_some()
        && site.cohorts.fresh().last + QUIET < view.ended
        && !view.ended.is_multiple_of(LOOK_AGAIN)
    {
        return None;
    }
    match pattern::standing(site, &case.pattern, most, view) {
        Standing::Growing => {
            case.over = None;
            None
        }
        Standing::Stopped(step) => {
            if case.used() < Use::Again && stage(step) {
                case.over = Some(step);
                return None;
            }
            let from = case.pattern.first;
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
            if once && case.used() < Use::Read && site.cohorts.fresh().last <= fell + 1 {
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
