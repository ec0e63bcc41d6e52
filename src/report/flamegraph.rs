//! A flame graph as one SVG image: a picture to send or to print. The page of [`super::html`] has one that
//! can be zoomed.
//!
//! Must not know: files.
//! Invariant: well-formed XML whatever names the frames have; no script, nothing from elsewhere.

use super::folded::{self, Which};
use super::model::Report;
use super::units;
use crate::ledger::Frame;
use std::fmt::Write;

const WIDTH: f64 = 1200.0;
const ROW: f64 = 18.0;
const TOP: f64 = 44.0;
/// Boxes thinner than this are left out.
const THIN: f64 = 0.5;
/// Frames of a stack that are drawn, from the outermost on.
const DEEP: usize = 400;
/// Width of a character, about.
const CHARACTER: f64 = 6.7;

struct Node<'a> {
    frame: Option<&'a Frame>,
    bytes: u64,
    blocks: u64,
    kids: Vec<Node<'a>>,
}

/// The image.
pub fn svg(report: &Report, which: Which) -> String {
    let mut root = Node { frame: None, bytes: 0, blocks: 0, kids: Vec::new() };
    for site in &report.sites {
        let (bytes, blocks) = which.of(site, report.run.steps);
        if bytes == 0 {
            continue;
        }
        root.bytes += bytes;
        root.blocks += blocks;
        let mut at = &mut root;
        for frame in site.stack.iter().rev().take(DEEP) {
            let known = at.kids.iter().position(|kid| kid.frame == Some(frame));
            let place = known.unwrap_or_else(|| {
                at.kids.push(Node { frame: Some(frame), bytes: 0, blocks: 0, kids: Vec::new() });
                at.kids.len() - 1
            });
            at = &mut at.kids[place];
            at.bytes += bytes;
            at.blocks += blocks;
        }
    }
    let mut boxes = String::new();
    let mut depth = 0;
    draw(&mut boxes, &root, 0.0, WIDTH, 0, root.bytes, &mut depth);
    let height = TOP + (depth as f64 + 1.0) * ROW + 10.0;
    let what = match which {
        Which::Live => "Live bytes at the last step",
        Which::Survivors => "Bytes that outlived the step of their birth",
    };
    let command = escape(&report.run.command.join(" "), 120);
    let total = units::bytes(root.bytes as f64);
    format!(
        "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n\
         <svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" width=\"{WIDTH}\" height=\"{height}\" \
         font-family=\"DejaVu Sans Mono, Menlo, Consolas, monospace\" font-size=\"11\" role=\"img\" aria-label=\"{what}: {total}\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"#fbfaf7\"/>\n\
         <text x=\"6\" y=\"17\" font-size=\"14\" font-family=\"DejaVu Sans, Arial, sans-serif\" fill=\"#1b2428\">{what}: {total}</text>\n\
         <text x=\"6\" y=\"34\" fill=\"#566269\">{command}</text>\n\
         {boxes}</svg>\n"
    )
}

fn draw(out: &mut String, node: &Node, left: f64, width: f64, depth: usize, all: u64, deepest: &mut usize) {
    *deepest = (*deepest).max(depth);
    let (name, colour) = match node.frame {
        None => (format!("all {}", units::bytes(node.bytes as f64)), "#dfe3e4"),
        Some(frame) => {
            let colour = match (frame.user, frame.kind == "native") {
                (true, _) => "#8cc0d6",
                (_, true) => "#d9d0e6",
                _ => "#dfe3e4",
            };
            (folded::frame(frame).replacen('_', " ", usize::from(!frame.function.contains('_'))), colour)
        }
    };
    let y = TOP + depth as f64 * ROW;
    let percent = if all == 0 { 0.0 } else { 100.0 * node.bytes as f64 / all as f64 };
    let full = node.frame.map_or_else(|| name.clone(), |f| format!("{} {}:{}", f.function, f.file, f.line));
    let _ = writeln!(
        out,
        "<g><title>{}\n{} ({percent:.1} %) in {}</title><rect x=\"{left:.1}\" y=\"{y}\" width=\"{:.1}\" \
         height=\"{}\" rx=\"2\" fill=\"{colour}\"/>{}</g>",
        escape(&full, 400),
        units::bytes(node.bytes as f64),
        units::plural(node.blocks, "block"),
        (width - 0.6).max(0.3),
        ROW - 1.0,
        label(&name, left, y, width)
    );
    let mut kids: Vec<&Node> = node.kids.iter().collect();
    kids.sort_by_key(|kid| std::cmp::Reverse(kid.bytes));
    let mut at = left;
    for kid in kids {
        let part = width * kid.bytes as f64 / node.bytes.max(1) as f64;
        if part >= THIN {
            draw(out, kid, at, part, depth + 1, all, deepest);
        }
        at += part;
    }
}

fn label(name: &str, left: f64, y: f64, width: f64) -> String {
    let fits = ((width - 8.0) / CHARACTER) as usize;
    if fits < 3 {
        return String::new();
    }
    format!("<text x=\"{:.1}\" y=\"{}\" fill=\"#0d2730\">{}</text>", left + 4.0, y + 12.5, escape(name, fits))
}

/// Text for XML, cut to `most` characters; what XML 1.0 cannot hold is replaced.
fn escape(text: &str, most: usize) -> String {
    let long = text.chars().count() > most;
    let mut out = String::new();
    for c in text.chars().take(if long { most.saturating_sub(1) } else { most }) {
        match c {
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '&' => out.push_str("&amp;"),
            '"' => out.push_str("&quot;"),
            c if c.is_control() || c == '\u{fffe}' || c == '\u{ffff}' => out.push('\u{fffd}'),
            c => out.push(c),
        }
    }
    if long {
        out.push('…');
    }
    out
}
