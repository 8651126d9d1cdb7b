// Draws a mask (COCO's uncompressed RLE) over an image: its pixels glow, the rest is dimmed.
"use strict";
window.drawMask = function (canvas, rle) {
  const [height, width] = rle.size;
  canvas.width = width;
  canvas.height = height;
  const context = canvas.getContext("2d"), pixels = context.createImageData(width, height);
  let place = 0, inside = false;
  for (const run of rle.counts) {
    for (const end = place + run; place < end; place++) { // down the columns
      const p = 4 * ((place % height) * width + Math.floor(place / height));
      pixels.data.set(inside ? [252, 125, 30, 110] : [8, 7, 26, 150], p);
    }
    inside = !inside;
  }
  context.putImageData(pixels, 0, 0);
};
