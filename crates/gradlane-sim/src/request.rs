//! Text in, text out: the simulator as other languages call it.

use crate::error::SimError;
use crate::ring_fused::{ring_fused, RingScenario};
use crate::scenario::Scenario;
use crate::simulation::simulate;
use serde::Deserialize;
use serde_json::{json, Value};

/// A scenario of one of the models.
#[derive(Clone, Debug, Deserialize)]
#[serde(tag = "model", rename_all = "kebab-case")]
enum Request {
    /// A cluster of engines.
    Cluster(Box<Scenario>),
    /// Fused buffers and rings.
    RingFused(RingScenario),
}

/// Runs the request `{"model": "cluster", ...}` (a [`Scenario`]) and `{"model": "ring-fused", ...}` (a
/// [`RingScenario`]) and returns `{"report": ...}`, and `"trace"` (see [`crate::Trace::to_json`]) where asked for.
///
/// # Errors
/// [`SimError::Argument`] when the text is no such object or a value makes no sense; otherwise as
/// [`simulate`].
pub fn run_request(json: &str) -> Result<String, SimError> {
    let request: Request = serde_json::from_str(json)
        .map_err(|error| SimError::Argument(format!("scenario: {error}")))?;
    let reply = match request {
        Request::Cluster(scenario) => {
            let outcome = simulate(&scenario)?;
            let mut reply = json!({ "report": value(&outcome.report)? });
            if let Some(trace) = &outcome.trace {
                reply["trace"] = trace.to_json(&scenario.profile);
            }
            reply
        }
        Request::RingFused(scenario) => json!({ "report": value(&ring_fused(&scenario)?)? }),
    };
    Ok(reply.to_string())
}

fn value(report: &impl serde::Serialize) -> Result<Value, SimError> {
    serde_json::to_value(report).map_err(|error| SimError::Argument(format!("report: {error}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    const PROFILE: &str = r#"{"tensors": [{"name": "w", "numel": 1000, "need_s": 0, "ready_s": 0.3}],
        "forward_s": 0.1, "compute_s": 0.3}"#;

    #[test]
    fn both_models_reply() {
        let cluster = format!(
            r#"{{"model": "cluster", "profile": {PROFILE}, "workers": 2, "strategy": "p3",
            "network": {{"rate_bps": 1e9}}, "outputs": {{"trace": true}}}}"#
        );
        let text = run_request(&cluster).expect("a report");
        assert!(text.contains("\"step_s\":") && text.contains("\"spans\":"), "{text}");
        let rings = format!(
            r#"{{"model": "ring-fused", "profile": {PROFILE}, "rate_bps": 1e9,
            "rings": {{"kind": "flat", "workers": 4}}}}"#
        );
        assert!(run_request(&rings).expect("a report").contains("\"scaling_factor\":"));
    }

    #[test]
    fn unknown_models_and_fields_are_refused() {
        for (json, named) in [
            (r#"{"model": "crystal-ball"}"#, "crystal-ball"),
            (r#"{"model": "ring-fused", "rate": 1}"#, "rate"),
            (r#"{"model": "cluster", "workres": 1}"#, "workres"),
            ("[", "scenario"),
        ] {
            let text = run_request(json).map_err(|error| error.to_string());
            assert!(text.as_ref().is_err_and(|text| text.contains(named)), "{json}: {text:?}");
        }
    }
}
