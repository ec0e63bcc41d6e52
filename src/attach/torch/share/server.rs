//! Passing file descriptors to another process of the same user.
//!
//! Must not know: what a descriptor stands for. The sender serves them from a thread behind a socket in
//! the abstract namespace; the receiver asks for numbers and gets descriptors of its own. (The kernel's
//! `pidfd_getfd` needs the right to trace the other process, which many machines do not give to siblings.)
//! Invariants: only descriptors that were offered are served, and only to processes of the same user.

use std::collections::HashSet;
use std::io::{Error, ErrorKind, Read, Result, Write};
use std::mem::{MaybeUninit, size_of};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::time::Duration;

use parking_lot::Mutex;

/// A receiver that hangs must not keep the server from the next one.
const PATIENCE: Duration = Duration::from_secs(10);
/// More pieces than one block can have is not a request of ours.
const MOST: usize = 65_536;

struct Server {
    /// The process that serves: a forked child must start its own.
    process: u32,
    name: String,
}

static SERVER: Mutex<Option<Server>> = Mutex::new(None);
static OFFERED: Mutex<Option<HashSet<i32>>> = Mutex::new(None);

/// A descriptor received from another process; closed when dropped.
pub struct Received(OwnedFd);

impl Received {
    pub fn number(&self) -> i32 {
        self.0.as_raw_fd()
    }
}

/// Lets the server hand out a descriptor, until the driver closes it.
pub fn offer(file: i32) {
    crate::driver::cuda::on_close(withdraw);
    OFFERED.lock().get_or_insert_with(HashSet::new).insert(file);
}

pub(super) fn withdraw(file: i32) {
    if let Some(offered) = OFFERED.lock().as_mut() {
        offered.remove(&file);
    }
}

/// Where this process serves its descriptors; starts serving at the first call.
pub fn name() -> Result<String> {
    let mut server = SERVER.lock();
    if let Some(server) = server.as_ref()
        && server.process == std::process::id()
    {
        return Ok(server.name.clone());
    }
    let process = std::process::id();
    let name = format!("strandline-{process}-{:016x}", random()?);
    let listener = UnixListener::bind_addr(&SocketAddr::from_abstract_name(&name)?)?;
    std::thread::Builder::new().name("strandline-share".into()).spawn(move || {
        for stream in listener.incoming().flatten() {
            // A receiver that broke off is its own loss.
            let _ = serve(&stream);
        }
    })?;
    *server = Some(Server { process, name: name.clone() });
    Ok(name)
}

/// A number that nobody guesses, so that nobody binds the name first.
fn random() -> Result<u64> {
    let mut bytes = [0u8; 8];
    // SAFETY: room for eight bytes.
    let got = unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), bytes.len(), 0) };
    if got == 8 { Ok(u64::from_ne_bytes(bytes)) } else { Err(Error::last_os_error()) }
}

/// Answers one receiver: a count and so many numbers come in; each descriptor goes out with one byte.
fn serve(mut stream: &UnixStream) -> Result<()> {
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    check_user(stream)?;
    for file in read_numbers(stream)? {
        // Sent under the lock: a descriptor that is withdrawn is closed, and its number may name another file.
        let offered = OFFERED.lock();
        if offered.as_ref().is_some_and(|offered| offered.contains(&file)) {
            send(stream, file)?;
        } else {
            stream.write_all(&[0])?;
        }
    }
    Ok(())
}

fn read_numbers(mut stream: &UnixStream) -> Result<Vec<i32>> {
    let mut count = [0u8; 4];
    stream.read_exact(&mut count)?;
    let count = u32::from_ne_bytes(count) as usize;
    if count > MOST {
        return Err(ErrorKind::InvalidInput.into());
    }
    let mut bytes = vec![0u8; 4 * count];
    stream.read_exact(&mut bytes)?;
    Ok(bytes.chunks_exact(4).map(|four| i32::from_ne_bytes([four[0], four[1], four[2], four[3]])).collect())
}

/// Refuses processes of other users.
fn check_user(stream: &UnixStream) -> Result<()> {
    let mut peer = MaybeUninit::<libc::ucred>::zeroed();
    let mut size = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: room for one ucred, whose size is passed.
    let result = unsafe {
        libc::getsockopt(
            stream.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            peer.as_mut_ptr().cast(),
            &mut size,
        )
    };
    if result != 0 {
        return Err(Error::last_os_error());
    }
    // SAFETY: filled in by the kernel, and all-zero before.
    let peer = unsafe { peer.assume_init() };
    // SAFETY: asks for a number.
    let own = unsafe { libc::geteuid() };
    if peer.uid == own { Ok(()) } else { Err(ErrorKind::PermissionDenied.into()) }
}

/// Asks another process's server for descriptors.
pub fn fetch(server: &str, files: &[i32]) -> Result<Vec<Received>> {
    let mut stream = UnixStream::connect_addr(&SocketAddr::from_abstract_name(server)?)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    check_user(&stream)?;
    let mut request = (files.len() as u32).to_ne_bytes().to_vec();
    request.extend(files.iter().flat_map(|file| file.to_ne_bytes()));
    stream.write_all(&request)?;
    files.iter().map(|_| receive(&stream)).collect()
}

/// Room for the control message that carries one descriptor, aligned as the kernel wants it.
#[repr(C, align(8))]
struct Control([u8; 64]);

fn send(stream: &UnixStream, file: i32) -> Result<()> {
    with_message(|message| {
        // SAFETY: `message` has a control buffer of 64 bytes, more than one descriptor needs.
        unsafe {
            message.msg_controllen = libc::CMSG_SPACE(size_of::<i32>() as u32) as _;
            let header = libc::CMSG_FIRSTHDR(message);
            (*header).cmsg_level = libc::SOL_SOCKET;
            (*header).cmsg_type = libc::SCM_RIGHTS;
            (*header).cmsg_len = libc::CMSG_LEN(size_of::<i32>() as u32) as _;
            libc::CMSG_DATA(header).cast::<i32>().write_unaligned(file);
            libc::sendmsg(stream.as_raw_fd(), message, libc::MSG_NOSIGNAL)
        }
    })
    .map(|_| ())
}

fn receive(stream: &UnixStream) -> Result<Received> {
    let mut file = -1;
    let read = with_message(|message| {
        message.msg_controllen = size_of::<Control>() as _;
        // SAFETY: the buffers of `message` are as large as it says.
        unsafe {
            let read = libc::recvmsg(stream.as_raw_fd(), message, libc::MSG_CMSG_CLOEXEC);
            let header = libc::CMSG_FIRSTHDR(message);
            if read == 1 && !header.is_null() && (*header).cmsg_type == libc::SCM_RIGHTS {
                file = libc::CMSG_DATA(header).cast::<i32>().read_unaligned();
            }
            read
        }
    })?;
    if read == 1 && file >= 0 {
        // SAFETY: the kernel just made this descriptor for us.
        return Ok(Received(unsafe { OwnedFd::from_raw_fd(file) }));
    }
    Err(Error::new(ErrorKind::NotFound, "the process that shared it no longer does"))
}

/// Runs a call on a message of one byte with room for one descriptor.
fn with_message(run: impl FnOnce(&mut libc::msghdr) -> isize) -> Result<isize> {
    let mut byte = [1u8];
    let mut part = libc::iovec { iov_base: byte.as_mut_ptr().cast(), iov_len: 1 };
    let mut control = Control([0; 64]);
    // SAFETY: all-zero is a valid value of this C struct.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = &mut part;
    message.msg_iovlen = 1;
    message.msg_control = control.0.as_mut_ptr().cast();
    let result = run(&mut message);
    if result < 0 { Err(Error::last_os_error()) } else { Ok(result) }
}
