(function(){
var tip=document.getElementById('tip');
document.querySelectorAll('.m').forEach(function(mark){
  var title=mark.querySelector(':scope>title');
  if(title){mark.dataset.tip=title.textContent;title.remove();mark.setAttribute('aria-label',mark.dataset.tip)}
});
function show(event){
  var mark=event.target.closest&&event.target.closest('[data-tip]');
  if(!mark){tip.hidden=true;return}
  tip.textContent=mark.dataset.tip;tip.hidden=false;
  var box=tip.getBoundingClientRect(),x=event.clientX+14,y=event.clientY+16;
  if(x+box.width>innerWidth-8)x=Math.max(8,innerWidth-8-box.width);
  if(y+box.height>innerHeight-8)y=Math.max(8,event.clientY-box.height-12);
  tip.style.left=x+'px';tip.style.top=y+'px';
}
document.addEventListener('pointermove',show);
document.addEventListener('pointerdown',show);
document.addEventListener('scroll',function(){tip.hidden=true},{passive:true});
document.querySelectorAll('[data-toggle]').forEach(function(button){
  button.addEventListener('click',function(){
    var on=button.getAttribute('aria-pressed')!=='true';
    button.setAttribute('aria-pressed',on);
    button.closest('section').querySelectorAll('[data-series]').forEach(function(series){
      if(series.dataset.series===button.dataset.toggle)series.classList.toggle('off',!on);
    });
  });
});
})();
