//! The size of the screen, by RandR.
//!
//! ```text
//!   a mode of that size ─► screen large enough for both ─► output shows the mode ─► screen exact
//! ```
//!
//! Always: the screen is never smaller than what its output shows, which the server would refuse.
//! When it fails: the screen has its old size; a mode of the agent's may be left, which the next
//! change removes.

use rustix::io::Errno;
use sandtree_proto::Failure;
use x11rb_protocol::protocol::randr::{
    AddOutputModeRequest, Connection, CreateModeRequest, DeleteOutputModeRequest,
    DestroyModeRequest, GetCrtcInfoRequest, GetOutputInfoReply, GetOutputInfoRequest,
    GetScreenResourcesCurrentReply, GetScreenResourcesCurrentRequest, GetScreenSizeRangeRequest,
    ModeFlag, ModeInfo, QueryVersionRequest, Rotation, SetConfig, SetCrtcConfigRequest,
    SetScreenSizeRequest,
};

use super::session::Session;
use crate::failure::{refusal, tolerate};

/// The names of the agent's modes begin with this.
const OURS: &str = "sandtree-";
/// The blank parts around the picture, as for flat displays: before, during and after the pulse.
const HORIZONTAL: [u16; 3] = [48, 32, 80];
const VERTICAL: [u16; 3] = [3, 6, 14];
/// A machine has one output.
const OUTPUTS_MAX: usize = 16;
/// One is left by each change that failed.
const OLD_MODES_MAX: usize = 64;
const REFRESH_HZ: u32 = 60;
/// Programs compute the size of fonts from this.
const PIXELS_PER_INCH: u32 = 96;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Size {
    width: u16,
    height: u16,
}

/// An output of the screen that shows a picture.
struct Shown {
    output: u32,
    crtc: u32,
    info: GetOutputInfoReply,
}

impl Session {
    pub fn set_size(&mut self, width: u16, height: u16) -> Result<(), Failure> {
        let wanted = Size { width, height };
        self.wire.call(QueryVersionRequest {
            major_version: 1,
            minor_version: 3,
        })?;
        self.check_range(wanted)?;
        let (width, height) = self.size()?;
        let old = Size { width, height };
        if wanted == old {
            return Ok(());
        }
        let resources = self.resources()?;
        let shown = self.shown(&resources)?;
        let mode = self.mode(wanted, &resources, &shown)?;
        let changed = self.change(old, wanted, &shown, mode);
        if changed.is_err() && !self.wire.is_broken() {
            // The first error is the one to report.
            tolerate(self.set_screen(old));
        }
        changed?;
        self.remove_modes(&shown, &resources, mode)
    }

    fn check_range(&mut self, wanted: Size) -> Result<(), Failure> {
        let window = self.root;
        let range = self.wire.call(GetScreenSizeRangeRequest { window })?;
        let Size { width, height } = wanted;
        if (range.min_width.max(1)..=range.max_width).contains(&width)
            && (range.min_height.max(1)..=range.max_height).contains(&height)
        {
            return Ok(());
        }
        Err(refusal(
            Errno::INVAL,
            format!(
                "a screen of {width}x{height} is not possible: use {}x{} to {}x{}",
                range.min_width, range.min_height, range.max_width, range.max_height
            ),
        ))
    }

    fn resources(&mut self) -> Result<GetScreenResourcesCurrentReply, Failure> {
        let window = self.root;
        self.wire.call(GetScreenResourcesCurrentRequest { window })
    }

    /// The output with a picture; else the first one that is connected.
    fn shown(&mut self, resources: &GetScreenResourcesCurrentReply) -> Result<Shown, Failure> {
        let mut found: Option<Shown> = None;
        for &output in resources.outputs.iter().take(OUTPUTS_MAX) {
            let info = self.wire.call(GetOutputInfoRequest {
                output,
                config_timestamp: resources.config_timestamp,
            })?;
            let is_on = info.crtc != 0;
            let crtc = if is_on {
                Some(info.crtc)
            } else {
                info.crtcs.first().copied()
            };
            let is_candidate = info.connection == Connection::CONNECTED;
            if let Some(crtc) = crtc
                && is_candidate
                && (is_on || found.is_none())
            {
                let is_last = is_on;
                found = Some(Shown { output, crtc, info });
                if is_last {
                    break;
                }
            }
        }
        found.ok_or_else(|| refusal(Errno::NXIO, "the X server has no output that is connected"))
    }

    /// A mode of this size of the output, which is made if there is none.
    fn mode(
        &mut self,
        wanted: Size,
        resources: &GetScreenResourcesCurrentReply,
        shown: &Shown,
    ) -> Result<u32, Failure> {
        let name = name(wanted);
        let fits = |mode: &&ModeInfo| mode.width == wanted.width && mode.height == wanted.height;
        let mut of_output = resources.modes.iter().filter(fits);
        if let Some(mode) = of_output.find(|mode| shown.info.modes.contains(&mode.id)) {
            return Ok(mode.id);
        }
        let mut named = named_modes(resources);
        let existing = named.find(|(_, found)| *found == name.as_bytes());
        let mode = match existing {
            Some((mode, _)) => mode,
            None => self.create_mode(wanted, &name)?,
        };
        let output = shown.output;
        self.wire.check(AddOutputModeRequest { output, mode })?;
        Ok(mode)
    }

    fn create_mode(&mut self, wanted: Size, name: &str) -> Result<u32, Failure> {
        let window = self.root;
        let created = self.wire.call(CreateModeRequest {
            window,
            mode_info: timing(wanted, name),
            name: name.as_bytes().into(),
        })?;
        Ok(created.mode)
    }

    fn change(&mut self, old: Size, new: Size, shown: &Shown, mode: u32) -> Result<(), Failure> {
        let both = Size {
            width: old.width.max(new.width),
            height: old.height.max(new.height),
        };
        if both != old {
            self.set_screen(both)?;
        }
        self.show(shown, mode)?;
        if both != new {
            self.set_screen(new)?;
        }
        Ok(())
    }

    fn show(&mut self, shown: &Shown, mode: u32) -> Result<(), Failure> {
        let crtc = shown.crtc;
        // Made anew by the change of the screen.
        let config_timestamp = self.resources()?.config_timestamp;
        let now = self.wire.call(GetCrtcInfoRequest {
            crtc,
            config_timestamp,
        })?;
        let rotation = if now.mode == 0 {
            Rotation::ROTATE0
        } else {
            now.rotation
        };
        let set = self.wire.call(SetCrtcConfigRequest {
            crtc,
            timestamp: 0,
            config_timestamp,
            x: 0,
            y: 0,
            mode,
            rotation,
            outputs: vec![shown.output].into(),
        })?;
        if set.status == SetConfig::SUCCESS {
            return Ok(());
        }
        Err(refusal(
            Errno::INVAL,
            format!(
                "the X server cannot show this size on {}: status {}",
                String::from_utf8_lossy(&shown.info.name),
                u8::from(set.status)
            ),
        ))
    }

    fn set_screen(&mut self, size: Size) -> Result<(), Failure> {
        let window = self.root;
        self.wire.check(SetScreenSizeRequest {
            window,
            width: size.width,
            height: size.height,
            mm_width: millimeters(size.width),
            mm_height: millimeters(size.height),
        })
    }

    /// Removes the modes that earlier changes made.
    fn remove_modes(
        &mut self,
        shown: &Shown,
        resources: &GetScreenResourcesCurrentReply,
        current: u32,
    ) -> Result<(), Failure> {
        let output = shown.output;
        for (mode, _) in named_modes(resources).take(OLD_MODES_MAX) {
            if mode != current {
                // Another program may have removed it, or use it on another output.
                self.wire
                    .try_send(DeleteOutputModeRequest { output, mode })?;
                self.wire.try_send(DestroyModeRequest { mode })?;
            }
        }
        self.wire.sync()
    }
}

fn name(size: Size) -> String {
    format!("{OURS}{}x{}", size.width, size.height)
}

/// The agent's modes. The names of all modes follow each other without separators.
fn named_modes(resources: &GetScreenResourcesCurrentReply) -> impl Iterator<Item = (u32, &[u8])> {
    let mut rest = &resources.names[..];
    let names = resources.modes.iter().map(move |mode| {
        let length = usize::from(mode.name_len).min(rest.len());
        let (name, after) = rest.split_at(length);
        rest = after;
        (mode.id, name)
    });
    names.filter(|(_, name)| name.starts_with(OURS.as_bytes()))
}

fn timing(size: Size, name: &str) -> ModeInfo {
    let [hsync_start, hsync_end, htotal] = line(size.width, HORIZONTAL);
    let [vsync_start, vsync_end, vtotal] = line(size.height, VERTICAL);
    ModeInfo {
        id: 0,
        width: size.width,
        height: size.height,
        dot_clock: (u32::from(htotal) * u32::from(vtotal)).saturating_mul(REFRESH_HZ),
        hsync_start,
        hsync_end,
        htotal,
        hskew: 0,
        vsync_start,
        vsync_end,
        vtotal,
        name_len: name.len() as u16,
        mode_flags: ModeFlag::HSYNC_POSITIVE | ModeFlag::VSYNC_NEGATIVE,
    }
}

/// Where the pulse begins and ends, and the whole length.
fn line(visible: u16, blank: [u16; 3]) -> [u16; 3] {
    let mut at = visible;
    blank.map(|part| {
        at = at.saturating_add(part);
        at
    })
}

fn millimeters(pixels: u16) -> u32 {
    u32::from(pixels) * 254 / (PIXELS_PER_INCH * 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mode_has_a_pulse_between_picture_and_end() {
        let size = Size {
            width: 1280,
            height: 800,
        };
        let mode = timing(size, &name(size));
        assert_eq!(name(size), "sandtree-1280x800");
        let horizontal = [mode.hsync_start, mode.hsync_end, mode.htotal];
        assert_eq!(horizontal, [1328, 1360, 1440]);
        assert_eq!(
            [mode.vsync_start, mode.vsync_end, mode.vtotal],
            [803, 809, 823]
        );
        assert_eq!(mode.dot_clock, 1440 * 823 * 60);
        let huge = Size {
            width: u16::MAX,
            height: u16::MAX,
        };
        assert_eq!(timing(huge, "").htotal, u16::MAX);
    }

    #[test]
    fn modes_are_found_by_their_names() {
        let mode = |id, name: &str| ModeInfo {
            id,
            name_len: name.len() as u16,
            ..ModeInfo::default()
        };
        let names = ["1x1", "sandtree-2x2", "3x3"];
        let resources = GetScreenResourcesCurrentReply {
            modes: (0u32..)
                .zip(names)
                .map(|(id, name)| mode(id, name))
                .collect(),
            names: names.concat().into_bytes(),
            ..GetScreenResourcesCurrentReply::default()
        };
        let found: Vec<_> = named_modes(&resources).collect();
        assert_eq!(found, [(1, &b"sandtree-2x2"[..])]);
        assert_eq!(millimeters(960), 254);
    }
}
