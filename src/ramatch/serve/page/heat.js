// Draws a region map (rows of numbers in 0..1) smoothly over an image. Shared by the web page and the HTML report.
"use strict";
(function () {
  // Stops of the colour ramp: value, red, green, blue, opacity. Little said: the picture is dimmed. Much said: it glows.
  const RAMP = [
    [0.00, 8, 7, 26, 0.60], [0.20, 28, 10, 66, 0.54], [0.40, 120, 20, 130, 0.42], [0.60, 225, 45, 95, 0.36],
    [0.80, 252, 125, 30, 0.36], [1.00, 255, 200, 60, 0.38],
  ];
  const STEPS = 8; // drawn points per grid cell, unless told; the browser smooths the rest
  const SHADES = 512;

  function colour(value) {
    let i = 1;
    while (i < RAMP.length - 1 && value > RAMP[i][0]) i++;
    const a = RAMP[i - 1], b = RAMP[i], t = Math.min(1, Math.max(0, (value - a[0]) / (b[0] - a[0])));
    return [1, 2, 3, 4].map((k) => a[k] + t * (b[k] - a[k]));
  }

  // Cubic B-spline through one line of values, `steps` points per value, ends repeated: smooth, never outside their range.
  function spline(values, steps) {
    const out = new Float32Array(values.length * steps), last = values.length - 1;
    const at = (i) => values[Math.min(last, Math.max(0, i))];
    for (let k = 0; k < out.length; k++) {
      const x = (k + 0.5) / steps - 0.5, i = Math.floor(x), t = x - i, u = 1 - t;
      out[k] = (u * u * u * at(i - 1) + (3 * t * t * t - 6 * t * t + 4) * at(i)
        + (3 * u * u * u - 6 * u * u + 4) * at(i + 1) + t * t * t * at(i + 2)) / 6;
    }
    return out;
  }

  function upsample(map, steps) {
    const wide = map.map((row) => spline(row, steps)), width = wide[0].length;
    const tall = Array.from({ length: width }, (_, x) => spline(wide.map((row) => row[x]), steps));
    return { width, height: tall[0].length, at: (x, y) => tall[x][y] };
  }

  const shades = Array.from({ length: SHADES + 1 }, (_, i) => colour(i / SHADES));

  window.drawHeat = function (canvas, map, steps = STEPS) {
    const smooth = upsample(map, steps);
    let low = Infinity, high = -Infinity;
    for (let y = 0; y < smooth.height; y++) for (let x = 0; x < smooth.width; x++) {
      const v = smooth.at(x, y);
      if (v < low) low = v;
      if (v > high) high = v;
    }
    canvas.width = smooth.width;
    canvas.height = smooth.height;
    const context = canvas.getContext("2d"), pixels = context.createImageData(smooth.width, smooth.height);
    const span = Math.max(high - low, 1e-6), flat = high - low < 1e-6;
    for (let y = 0, p = 0; y < smooth.height; y++) for (let x = 0; x < smooth.width; x++, p += 4) {
      const v = flat ? 0.5 : Math.pow((smooth.at(x, y) - low) / span, 0.8); // a little more of the flanks
      const [r, g, b, a] = shades[Math.round(v * SHADES)];
      pixels.data[p] = r; pixels.data[p + 1] = g; pixels.data[p + 2] = b; pixels.data[p + 3] = 255 * a;
    }
    context.putImageData(pixels, 0, 0);
  };
})();
