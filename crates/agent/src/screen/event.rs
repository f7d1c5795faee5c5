//! The events of an X server that the agent uses.

use x11rb_protocol::protocol::xproto::{
    self, ClientMessageEvent, PropertyNotifyEvent, SelectionClearEvent, SelectionNotifyEvent,
    SelectionRequestEvent,
};
use x11rb_protocol::x11_utils::TryParse;

#[derive(Debug, Clone, Copy)]
pub enum Event {
    Property(PropertyNotifyEvent),
    SelectionClear(SelectionClearEvent),
    SelectionRequest(SelectionRequestEvent),
    SelectionNotify(SelectionNotifyEvent),
    Message(ClientMessageEvent),
}

impl Event {
    /// None for all other events.
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        // The highest bit marks events that a client sent.
        match bytes.first()? & 0x7f {
            xproto::PROPERTY_NOTIFY_EVENT => parsed(bytes).map(Self::Property),
            xproto::SELECTION_CLEAR_EVENT => parsed(bytes).map(Self::SelectionClear),
            xproto::SELECTION_REQUEST_EVENT => parsed(bytes).map(Self::SelectionRequest),
            xproto::SELECTION_NOTIFY_EVENT => parsed(bytes).map(Self::SelectionNotify),
            xproto::CLIENT_MESSAGE_EVENT => parsed(bytes).map(Self::Message),
            _ => None,
        }
    }
}

fn parsed<E: TryParse>(bytes: &[u8]) -> Option<E> {
    E::try_parse(bytes).ok().map(|(event, _)| event)
}
