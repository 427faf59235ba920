//! What the head of a request has to say before anything else of it is looked at.

use std::net::{IpAddr, Ipv6Addr};

use axum::{
    body::HttpBody as _,
    extract::Request,
    http::{HeaderMap, HeaderValue, StatusCode, Version, header},
};

use super::error::{ApiError, ApiResult};

/// Whose names the server answers to.
#[derive(Debug)]
pub(super) enum Hosts {
    Any,
    /// Addresses, `localhost`, and this name. The name of a site is none of them, though it may be made to lead to this
    /// machine, so that the site's page would ask as one of the server's own.
    Local(String),
}

impl Hosts {
    fn has(&self, host: &str) -> bool {
        let Self::Local(name) = self else { return true };
        let address = host.trim_start_matches('[').trim_end_matches(']');
        address.parse::<IpAddr>().is_ok()
            || ["localhost", name.as_str()].iter().any(|known| known.eq_ignore_ascii_case(host))
    }
}

/// Refuses a request whose head says nothing certain.
///
/// # Errors
/// 400 for the `Host` fields that RFC 9112, 3.2 refuses, 403 for another site's, 501 for a coding of the body that is
/// not known, and 413 before a client that waits for it is told to send a body that is too long. Another one reads no
/// answer before it has sent all.
pub(super) fn check(hosts: &Hosts, limit: usize, request: &Request) -> ApiResult<()> {
    let headers = request.headers();
    let codings = codings(headers, header::TRANSFER_ENCODING);
    if !codings.is_empty() && codings != ["chunked"] {
        return Err(ApiError::with_status(StatusCode::NOT_IMPLEMENTED, "The only Transfer-Encoding is chunked."));
    }
    if headers.contains_key(header::EXPECT) && request.body().size_hint().lower() > limit as u64 {
        return Err(too_long(limit));
    }
    let refused = || ApiError::bad_request("A request has one Host, a name or an address with or without a port.");
    let mut given = headers.get_all(header::HOST).iter();
    let named = match (given.next(), given.next()) {
        (Some(host), None) => Some(host.to_str().ok().and_then(host_of).ok_or_else(refused)?),
        (None, _) if request.version() < Version::HTTP_11 => None,
        _ => return Err(refused()),
    };
    // A target with a host has the one that counts.
    let named = match request.uri().authority() {
        Some(authority) => Some(host_of(authority.as_str()).ok_or_else(refused)?),
        None => named,
    };
    if let Some(host) = named.filter(|host| !hosts.has(host)) {
        let message = format!(
            "The server answers to addresses, `localhost` and --host, not to `{host}`, unless it has --api-key."
        );
        return Err(ApiError::with_status(StatusCode::FORBIDDEN, message));
    }
    Ok(())
}

/// The error of a body that has more bytes.
pub(super) fn too_long(limit: usize) -> ApiError {
    let message = format!("The body has more than {} KiB, which are the most (--max-body-kib).", limit >> 10);
    ApiError::with_status(StatusCode::PAYLOAD_TOO_LARGE, message)
}

/// The codings that a field names, in lower case.
pub(super) fn codings(headers: &HeaderMap, name: header::HeaderName) -> Vec<String> {
    let text = |value: &HeaderValue| value.to_str().unwrap_or("not text").to_ascii_lowercase();
    let all: Vec<String> = headers.get_all(name).iter().map(text).collect();
    all.iter()
        .flat_map(|value| value.split(','))
        .map(str::trim)
        .filter(|coding| !coding.is_empty())
        .map(str::to_owned)
        .collect()
}

/// The host of a host and a port, in brackets if it is an address of version 6.
fn host_of(authority: &str) -> Option<&str> {
    let (host, port) = match authority.rsplit_once(':') {
        Some(parts) if !authority.ends_with(']') => parts,
        _ => (authority, ""),
    };
    let is_host = match host.strip_prefix('[') {
        Some(address) => address.strip_suffix(']').is_some_and(|address| address.parse::<Ipv6Addr>().is_ok()),
        None => host.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-._~!$&'()*+,;=%".contains(&byte)),
    };
    (is_host && port.bytes().all(|byte| byte.is_ascii_digit())).then_some(host)
}

#[cfg(test)]
mod tests {
    use axum::{body::Body, response::IntoResponse as _};

    use super::*;

    /// The status of a request of this version, with these lines behind its target.
    fn status(hosts: &Hosts, target: &str, version: Version, fields: &[(&str, &str)]) -> u16 {
        let mut request = Request::builder().uri(target).version(version);
        for (name, value) in fields {
            request = request.header(*name, *value);
        }
        let request = request.body(Body::empty()).expect("it is a request");
        check(hosts, 1 << 20, &request).map_or_else(|error| error.into_response().status().as_u16(), |()| 200)
    }

    #[test]
    fn a_request_has_one_host() {
        let local = Hosts::Local("Machine".into());
        for (fields, of_any, of_local) in [
            (&[][..], 400, 400),
            (&["a", "b"], 400, 400),
            (&["localhost", "localhost"], 400, 400),
            (&["localhost"], 200, 200),
            (&["LOCALHOST:8000"], 200, 200),
            (&["machine:1"], 200, 200),
            (&["127.0.0.1"], 200, 200),
            (&["127.0.0.1:8000"], 200, 200),
            (&["192.168.1.7:"], 200, 200),
            (&["[::1]"], 200, 200),
            (&["[::1]:8000"], 200, 200),
            (&[""], 200, 403),
            (&["evil.example"], 200, 403),
            (&["evil.example:8000"], 200, 403),
            (&["127.0.0.1.evil.example"], 200, 403),
            (&["localhost.evil.example"], 200, 403),
            (&["127.0.0.1evil"], 200, 403),
            (&["evil.example:8000@127.0.0.1"], 400, 400),
            (&["localhost, evil.example"], 400, 400),
            (&["localhost:evil"], 400, 400),
            (&["localhost/evil"], 400, 400),
            (&["[::1"], 400, 400),
            (&["[::1]x"], 400, 400),
            (&["::1"], 400, 400),
            (&["[evil.example]"], 400, 400),
            (&["\u{e9}vil"], 400, 400),
        ] {
            let fields: Vec<_> = fields.iter().map(|host| ("host", *host)).collect();
            for (hosts, right) in [(&Hosts::Any, of_any), (&local, of_local)] {
                assert_eq!(status(hosts, "/", Version::HTTP_11, &fields), right, "{hosts:?} {fields:?}");
            }
        }
        // Versions before 1.1 may have none; nobody's browser speaks them.
        assert_eq!(status(&local, "/", Version::HTTP_10, &[]), 200);
        assert_eq!(status(&local, "/", Version::HTTP_10, &[("host", "evil.example")]), 403);
        assert_eq!(status(&local, "/", Version::HTTP_10, &[("host", "a"), ("host", "b")]), 400);
        // The host of a target goes before the field.
        let target = "http://evil.example/";
        assert_eq!(status(&local, target, Version::HTTP_11, &[("host", "localhost")]), 403);
        assert_eq!(status(&local, "http://localhost/", Version::HTTP_11, &[("host", "evil.example")]), 200);
        assert_eq!(status(&local, "http://localhost/", Version::HTTP_11, &[]), 400);
    }

    #[test]
    fn a_body_has_a_coding_that_is_known() {
        for (codings, right) in [
            (&["chunked"][..], 200),
            (&["Chunked"], 200),
            (&["gzip, chunked"], 501),
            (&["gzip", "chunked"], 501),
            (&["chunked, chunked"], 501),
            (&["identity"], 501),
            (&["gzip"], 501),
        ] {
            let mut fields = vec![("host", "a")];
            fields.extend(codings.iter().map(|coding| ("transfer-encoding", *coding)));
            assert_eq!(status(&Hosts::Any, "/", Version::HTTP_11, &fields), right, "{codings:?}");
        }
    }
}
