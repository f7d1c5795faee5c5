//! A picture of a screen, and its PNG.

use sandtree_engine::Picture;

/// What a screen showed at one moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Screenshot {
    width: u32,
    height: u32,
    rgb: Vec<u8>,
}

impl Screenshot {
    pub fn width(&self) -> u32 {
        self.width
    }

    pub fn height(&self) -> u32 {
        self.height
    }

    /// Red, green and blue of each pixel, line by line.
    pub fn rgb(&self) -> &[u8] {
        &self.rgb
    }

    /// The picture as a PNG file. An agent waits for it, so it is compressed fast rather than well.
    pub fn png(&self) -> Vec<u8> {
        let mut file = Vec::new();
        let mut encoder = png::Encoder::new(&mut file, self.width, self.height);
        encoder.set_color(png::ColorType::Rgb);
        encoder.set_depth(png::BitDepth::Eight);
        encoder.set_compression(png::Compression::Fast);
        let written = encoder
            .write_header()
            .and_then(|mut writer| writer.write_image_data(&self.rgb));
        written.expect("a picture has as many bytes as its size says, and memory takes them");
        file
    }
}

impl From<Picture> for Screenshot {
    fn from(picture: Picture) -> Self {
        let Picture { width, height, rgb } = picture;
        Self { width, height, rgb }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_png_holds_every_pixel() {
        let rgb: Vec<u8> = (0..64 * 48 * 3)
            .map(|index| (index * 7 % 251) as u8)
            .collect();
        let screenshot = Screenshot {
            width: 64,
            height: 48,
            rgb: rgb.clone(),
        };
        let file = screenshot.png();
        let decoder = png::Decoder::new(std::io::Cursor::new(file));
        let mut reader = decoder.read_info().expect("it is a PNG");
        let mut decoded = vec![0; reader.output_buffer_size().expect("it has a size")];
        let frame = reader.next_frame(&mut decoded).expect("it has a picture");
        assert_eq!((frame.width, frame.height), (64, 48));
        assert_eq!(decoded, rgb);
    }
}
