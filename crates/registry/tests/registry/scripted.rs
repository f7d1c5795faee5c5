//! An HTTP server that answers each request as its test says, however wrong.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

/// A request as it came. Its body is read by the script, since some read only a part.
#[derive(Debug, Clone, Default)]
pub struct Request {
    pub method: String,
    pub path: String,
    pub headers: Vec<(String, String)>,
    /// Which request to this server it is, from zero.
    pub number: usize,
}

impl Request {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers
            .iter()
            .find(|(key, _)| key.eq_ignore_ascii_case(name))
            .map(|(_, value)| value.as_str())
    }

    pub fn length(&self) -> usize {
        self.header("content-length")
            .map_or(0, |text| text.parse().unwrap())
    }
}

/// Both directions of one connection.
pub trait Stream: Read + Write {}
impl<T: Read + Write> Stream for T {}

pub type Peer<'a> = BufReader<&'a mut dyn Stream>;
type Script = dyn Fn(&Request, &mut Peer) + Send + Sync;

pub struct Server {
    pub host: String,
    requests: Arc<Mutex<Vec<Request>>>,
    ended: Arc<AtomicBool>,
}

impl Server {
    pub fn start(script: impl Fn(&Request, &mut Peer) + Send + Sync + 'static) -> Self {
        Self::wrapped(script, |stream, serve| serve(stream))
    }

    /// A server whose connections are wrapped, in TLS for example.
    pub fn wrapped(
        script: impl Fn(&Request, &mut Peer) + Send + Sync + 'static,
        wrap: impl Fn(&mut TcpStream, &mut dyn FnMut(&mut dyn Stream)) + Send + Sync + 'static,
    ) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let host = listener.local_addr().unwrap().to_string();
        let requests = Arc::new(Mutex::new(Vec::new()));
        let ended = Arc::new(AtomicBool::new(false));
        let script: Arc<Script> = Arc::new(script);
        let wrap = Arc::new(wrap);
        let server = Self {
            host,
            requests: requests.clone(),
            ended: ended.clone(),
        };
        thread::spawn(move || {
            for stream in listener
                .incoming()
                .take_while(|_| !ended.load(Ordering::SeqCst))
            {
                let script = script.clone();
                let requests = requests.clone();
                let wrap = wrap.clone();
                let mut stream = stream.unwrap();
                stream
                    .set_read_timeout(Some(Duration::from_secs(20)))
                    .unwrap();
                thread::spawn(move || {
                    wrap(&mut stream, &mut |stream| {
                        serve(stream, &*script, &requests)
                    })
                });
            }
        });
        server
    }

    pub fn requests(&self) -> Vec<Request> {
        self.requests.lock().unwrap().clone()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::SeqCst);
        TcpStream::connect(&self.host).ok();
    }
}

/// One request for each connection; the end of the script closes it.
fn serve(stream: &mut dyn Stream, script: &Script, requests: &Mutex<Vec<Request>>) {
    let mut peer = BufReader::new(stream);
    let Some(mut request) = read_head(&mut peer) else {
        return;
    };
    {
        let mut requests = requests.lock().unwrap();
        request.number = requests.len();
        requests.push(request.clone());
    }
    script(&request, &mut peer);
    peer.get_mut().flush().ok();
}

fn read_head(peer: &mut Peer) -> Option<Request> {
    let mut line = String::new();
    peer.read_line(&mut line).ok()?;
    let mut words = line.split_whitespace();
    let method = words.next()?.to_owned();
    let path = words.next()?.to_owned();
    let mut headers = Vec::new();
    loop {
        let mut line = String::new();
        peer.read_line(&mut line).ok()?;
        let Some((name, value)) = line.trim_end().split_once(':') else {
            break;
        };
        headers.push((name.to_owned(), value.trim().to_owned()));
    }
    Some(Request {
        method,
        path,
        headers,
        number: 0,
    })
}

/// Writes a head without a body. The client may have gone away already.
pub fn head(peer: &mut Peer, status: u16, headers: &[(&str, &str)]) {
    let mut text = format!("HTTP/1.1 {status} Scripted\r\nConnection: close\r\n");
    for (name, value) in headers {
        text += &format!("{name}: {value}\r\n");
    }
    peer.get_mut().write_all((text + "\r\n").as_bytes()).ok();
}

/// Writes a whole answer of the right length, after the body of the request has come.
pub fn reply(
    peer: &mut Peer,
    request: &Request,
    status: u16,
    headers: &[(&str, &str)],
    body: &[u8],
) {
    take(peer, request.length());
    let length = body.len().to_string();
    let mut all = headers.to_vec();
    all.push(("Content-Length", &length));
    head(peer, status, &all);
    if request.method != "HEAD" {
        peer.get_mut().write_all(body).ok();
    }
}

/// Reads so much of a request's body.
pub fn take(peer: &mut Peer, length: usize) -> Vec<u8> {
    let mut body = vec![0; length];
    peer.read_exact(&mut body).unwrap();
    body
}
