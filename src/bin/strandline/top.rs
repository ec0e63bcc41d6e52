//! `strandline top`: watches a running job in a terminal, over its control socket.
//!
//! One thread asks, the other draws and reads keys, so that a job that is slow to answer does not freeze the
//! keys. A screen is drawn only when something changed: it may be far away.

use crate::top_draw::{Look, draw};
use crate::top_model::{App, Wish};
use clap::Args;
use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::crossterm::event::{self, Event};
use std::io::IsTerminal;
use std::process::ExitCode;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::Duration;
use strandline::attach::control::client::{Client, Process, Refused};
use strandline::attach::control::{Ask, MOST_SITES};
use strandline::report::live::Live;

/// Cells of the map that are asked for: more than a terminal is wide.
const CELLS: usize = 256;
const PATIENCE: Duration = Duration::from_secs(30);
/// How often keys are looked for.
const BLINK: Duration = Duration::from_millis(50);

/// Arguments of `strandline top`.
#[derive(Args)]
#[command(
    after_help = "Keys: q quit, s sort, / filter, arrows move, d next device, p pause, w write a report, ? help.\n\
                        NO_COLOR is honoured.\n\nExit codes: 0 quit, 2 the process cannot be watched."
)]
pub struct Top {
    /// The job's process
    #[arg(value_name = "PID", value_parser = clap::value_parser!(u32).range(1..))]
    pid: u32,
    /// Seconds between two looks
    #[arg(long, value_name = "SECONDS", default_value_t = 1.0)]
    interval: f64,
    /// Print the view once, as plain text
    #[arg(long)]
    once: bool,
}

/// What the asking thread tells.
enum News {
    State(Box<Live>),
    Report(String),
    Ended(String),
}

impl Top {
    /// Watches until `q`.
    pub fn run(self) -> Result<ExitCode, String> {
        if !(0.05..=3600.0).contains(&self.interval) {
            return Err(format!("--interval {}: 0.05 to 3600 seconds are meant", self.interval));
        }
        let process = Process::look(self.pid).map_err(|refused| refused.to_string())?;
        let mut client = Client::connect(&process).map_err(|refused| refused.to_string())?;
        if self.once {
            return once(&mut client);
        }
        if !std::io::stdout().is_terminal() || !std::io::stdin().is_terminal() {
            return Err("top needs a terminal; --once prints the view as text".to_owned());
        }
        let (tell, news) = channel();
        let (wish, wishes) = channel();
        let interval = Duration::from_secs_f64(self.interval);
        std::thread::spawn(move || ask(client, &process, interval, &tell, &wishes));
        let mut terminal =
            ratatui::try_init().map_err(|error| format!("the terminal cannot be used: {error}"))?;
        let shown = watch(&mut terminal, &news, &wish);
        ratatui::restore();
        shown.map(|()| ExitCode::SUCCESS).map_err(|error| format!("the terminal was lost: {error}"))
    }
}

fn live(client: &mut Client) -> Result<Live, Refused> {
    let answer = client.ask(&Ask::Live { sites: MOST_SITES, cells: CELLS }, PATIENCE)?;
    serde_json::from_value(answer)
        .map_err(|error| Refused::Said(format!("the job's answer is not understood: {error}")))
}

fn once(client: &mut Client) -> Result<ExitCode, String> {
    let mut app = App::default();
    app.take(live(client).map_err(|refused| refused.to_string())?);
    let rows = 30 + app.rows().len().min(60) as u16;
    let mut terminal = Terminal::new(TestBackend::new(120, rows)).map_err(|error| error.to_string())?;
    terminal.draw(|frame| draw(frame, &app, Look { colour: false })).map_err(|error| error.to_string())?;
    let buffer = terminal.backend().buffer();
    let mut text = String::new();
    for row in buffer.content.chunks(120) {
        let line: String = row.iter().map(|cell| cell.symbol()).collect();
        text += line.trim_end();
        text.push('\n');
    }
    // The last line names keys.
    let kept: Vec<&str> = text.lines().filter(|line| !line.contains("q quit")).collect();
    crate::files::print(&(kept.join("\n").trim_end().to_owned() + "\n"))?;
    Ok(ExitCode::SUCCESS)
}

/// Asks again and again, until the job is gone or nobody listens.
fn ask(
    mut client: Client,
    process: &Process,
    interval: Duration,
    tell: &Sender<News>,
    wishes: &Receiver<()>,
) {
    loop {
        match live(&mut client) {
            Ok(state) => {
                if tell.send(News::State(Box::new(state))).is_err() {
                    return;
                }
            }
            // An idle connection is closed by the job (we were stopped for a while): a new one may do.
            Err(Refused::Lost(..)) if process.lives() => match Client::connect(process) {
                Ok(again) => client = again,
                Err(_) => {
                    // A process that dies loses its threads first.
                    let gone = (0..20).any(|_| {
                        std::thread::sleep(BLINK);
                        !process.lives()
                    });
                    let how = if gone { "ended" } else { "goes on, but its run is over" };
                    let _ = tell.send(News::Ended(format!("process {} {how}", process.pid)));
                    return;
                }
            },
            Err(Refused::Said(why)) => {
                let _ = tell.send(News::Report(why));
            }
            Err(_) => {
                let _ = tell.send(News::Ended(format!("process {} ended", process.pid)));
                return;
            }
        }
        match wishes.recv_timeout(interval) {
            Ok(()) => {
                let said = match client.ask(&Ask::Dump { folder: None }, PATIENCE) {
                    Ok(answer) => format!("written: {}", answer["path"].as_str().unwrap_or("?")),
                    Err(refused) => refused.to_string(),
                };
                if tell.send(News::Report(said)).is_err() {
                    return;
                }
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return,
        }
    }
}

fn watch(
    terminal: &mut ratatui::DefaultTerminal,
    news: &Receiver<News>,
    wish: &Sender<()>,
) -> std::io::Result<()> {
    let look = Look { colour: std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty()) };
    let mut app = App::default();
    let mut changed = true;
    loop {
        for told in news.try_iter() {
            changed = true;
            match told {
                News::State(live) => app.take(*live),
                News::Report(said) => app.note = said,
                News::Ended(why) => app.ended = Some(format!("{why}; what was seen last is shown; q quits")),
            }
        }
        if std::mem::take(&mut changed) {
            terminal.draw(|frame| draw(frame, &app, look))?;
        }
        if !event::poll(BLINK)? {
            continue;
        }
        changed = true;
        if let Event::Key(key) = event::read()? {
            app.note.clear();
            match app.key(key) {
                Wish::Quit => return Ok(()),
                Wish::Dump => {
                    app.note = "writing a report …".to_owned();
                    let _ = wish.send(());
                }
                Wish::Nothing => {}
            }
        }
    }
}
