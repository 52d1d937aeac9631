// The page of viz/html.py: hints under the pointer, and the zoom of the Gantt chart.
(() => {
  "use strict";
  const tip = document.getElementById("tip");
  const point = (event) => {
    const shown = event.target.closest ? event.target.closest("[data-n]") : null;
    tip.hidden = !shown;
    if (!shown) return;
    tip.textContent = shown.dataset.n;
    const x = event.clientX + 14, y = event.clientY + 16;
    tip.style.left = Math.max(4, Math.min(x, innerWidth - tip.offsetWidth - 8)) + "px";
    tip.style.top = (y + tip.offsetHeight > innerHeight ? y - tip.offsetHeight - 30 : y) + "px";
  };
  document.addEventListener("pointermove", point);
  document.addEventListener("pointerdown", point);
  document.addEventListener("scroll", () => { tip.hidden = true; }, true);

  const svg = document.getElementById("gantt");
  if (!svg) return;
  const box = document.getElementById("scroll");
  const slider = document.getElementById("zoom"), times = document.getElementById("times");
  const bars = [...svg.querySelectorAll("rect")].map((rect) => {
    const text = rect.nextElementSibling;
    return [text, parseFloat(rect.getAttribute("width")) / 100, 6.2 * text.textContent.length + 4];
  });
  const axis = svg.querySelector(".axis");
  const labels = (width) => {
    for (const [text, part, need] of bars) text.classList.toggle("n", part * width < need);
    const gap = (axis.dataset.percent / 100) * width;
    const every = [1, 2, 5, 10, 20, 50, 100].find((n) => n * gap >= 60) || 200;
    for (const mark of axis.children) {
      const at = mark.dataset.i * gap;
      mark.classList.toggle("n", mark.dataset.i % every > 0 || at + 50 > width);
    }
  };
  const fit = () => requestAnimationFrame(() => labels(svg.getBoundingClientRect().width));
  // From 1 to 64 times, even in ratio. The time at `keep` pixels from the left stays in its place.
  const zoom = (keep) => {
    const factor = 64 ** (slider.value / 100);
    const at = (box.scrollLeft + keep) / svg.getBoundingClientRect().width;
    svg.style.width = 100 * factor + "%";
    box.scrollLeft = at * svg.getBoundingClientRect().width - keep;
    times.textContent = (factor < 10 ? factor.toFixed(1).replace(/\.0$/, "") : Math.round(factor)) + "x";
    fit();
  };
  slider.addEventListener("input", () => zoom(box.clientWidth / 2));
  box.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    slider.value = +slider.value - Math.sign(event.deltaY) * 4;
    zoom(event.clientX - box.getBoundingClientRect().left);
  }, { passive: false });
  addEventListener("resize", fit);
  // The page is not laid out for paper yet: this is about the width of a chart on A4.
  addEventListener("beforeprint", () => labels(500));
  addEventListener("afterprint", fit);
  labels(svg.getBoundingClientRect().width);
})();
